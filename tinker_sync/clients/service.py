"""`ServiceClient`: the client that makes all other clients and owns their session."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from tinker_sync._base.left_out import Removed, refuse_arguments
from tinker_sync._base.spelling import describe_unknown_parameter, find_closest
from tinker_sync.clients import _deadlines
from tinker_sync.clients._arguments import check_credential, check_service
from tinker_sync.clients._async import async_blocking
from tinker_sync.clients._loop_tools import LoopTools
from tinker_sync.config import Settings, Timeout
from tinker_sync.config.settings import MAX_RETRIES
from tinker_sync.errors import ClientClosedError
from tinker_sync.runtime import exits
from tinker_sync.runtime.client_runtime import CLOSE_LIMIT_S, ClientRuntime
from tinker_sync.runtime.naming import names_requests
from tinker_sync.runtime.pending import PENDING_LIMIT_S
from tinker_sync.runtime.session import Session
from tinker_sync.types._console import session_url, sessions_url

if TYPE_CHECKING:
    import requests
    from typing_extensions import Self

    from tinker_sync.data.tokenizer import Tokenizer
    from tinker_sync.insight.recording import Recording
    from tinker_sync.runtime.futures import APIFuture
    from tinker_sync.runtime.polls import QueueReport
    from tinker_sync.runtime.rate_limiter import RateLimiter
    from tinker_sync.types import GetServerCapabilitiesResponse
    from tinker_sync.wire.dialect import Dialect


_log = logging.getLogger("tinker_sync.clients")


@names_requests
class ServiceClient(LoopTools):
    """The client of the service. It makes all other clients, and owns their session.

    It connects to the server with the first request. Use it in a `with` block, or call `close`; a script that
    does neither ends its session when it exits. Any thread may use it.

    Args:
        user_metadata: your own notes about this session.
        project_id: the project of the session; None: `TINKER_PROJECT_ID`.
        display_name: the name of the session in lists.
        base_url: the server; "local" starts one on this machine for this process, with the first request;
            None: `TINKER_BASE_URL`, else the hosted service.
        api_key: the key; None: `TINKER_API_KEY`, else from `TINKER_CREDENTIAL_CMD`, else the stored one.
        default_headers_overrides: headers of every request; the older name of `default_headers`.
        default_headers: headers of every request.
        timeout: the longest silence of the server, seconds; a pair limits connecting and reading separately.
        max_retries: the number of retries of a call; None: ten, or as many as fit into five minutes if that
            is more.
        session: a `requests.Session` for headers, proxies, certificates, user name and password, and cookies.
        deadline: the longest time of a call without a deadline of its own, seconds; None: five minutes to
            twelve hours, by kind of call.
        dialect: the calls and encodings that the server supports: "auto" to find out, "proto" for the present
            protocol, "json" for an open server without protobuf, or a `Dialect`.
        on_queue_state: called on a thread of the client with a `QueueReport` each time the server reports
            on a request that waits.
        rate_limiter: a separate limiter of requests; None: the one that all clients of this process with
            this server and key share.

    Raises:
        ConfigurationError: an argument or an environment variable has a wrong type or value.
        CredentialError: there is no key for the hosted service.
        TypeError: an unknown keyword resembles a parameter, or an earlier version had it. Other unknown
            keywords cause a warning.
    """

    def __init__(
        self,
        user_metadata: dict[str, str] | None = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        default_headers: Mapping[str, str] | None = None,
        timeout: Timeout | float | tuple[float, float] | None = None,
        max_retries: int | None = None,
        session: requests.Session | None = None,
        deadline: float | None = None,
        dialect: Literal["auto", "proto", "json"] | Dialect = "auto",
        on_queue_state: Callable[[QueueReport], object] | None = None,
        rate_limiter: RateLimiter | None = None,
        **unknown: NoReturn,  # type checkers report every keyword that is not above
    ) -> None:
        if unknown:
            _refuse_mistyped(unknown)
            warnings.warn(
                f"ServiceClient: {', '.join(sorted(unknown))} has no meaning here and is ignored",
                FutureWarning,
                stacklevel=2,
            )
        check_service(
            user_metadata=user_metadata,
            timeout=timeout,
            deadline=deadline,
            on_queue_state=on_queue_state,
        )
        settings = Settings.resolve(
            base_url=base_url,
            api_key=api_key,
            project_id=project_id,
            default_headers={**(default_headers or {}), **(default_headers_overrides or {})},
            timeout=timeout,
            max_retries=MAX_RETRIES if max_retries is None else max_retries,
            session=session,
            deadline_s=deadline,
            dialect=dialect,
        )
        check_credential(settings)
        if settings.base_url.endswith("/api/v1"):
            # A warning only: the URL may be right behind a proxy with such a prefix.
            warnings.warn(
                "the base URL ends with /api/v1, which every call adds by itself; leave it out", stacklevel=2
            )
        self._runtime = ClientRuntime(
            settings,
            session=Session(
                user_metadata=user_metadata,
                project_id=settings.project_id,
                display_name=display_name,
            ),
            limiter=rate_limiter,
        )
        if on_queue_state is not None:
            self._runtime.notices.listen(on_queue_state)
        self._count()
        self._recordings: list[Recording] = []

    if not TYPE_CHECKING:  # so that type checkers report them
        attach, trainings, reconcile = Removed(), Removed(), Removed()

    # -------------------------------------------------------------------------------------- the service

    def get_server_capabilities(self) -> GetServerCapabilitiesResponse:
        """Return the models that the server offers. Blocks.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     [model.model_name for model in service.get_server_capabilities().supported_models]
        ['tinker-sync/tiny']
        """
        capabilities: GetServerCapabilitiesResponse = self._runtime.server.call(
            "get_server_capabilities", usual_s=_deadlines.REST_S
        )
        return capabilities

    def get_console_url(self) -> str:
        """Return the address of the web page of this session, or of all sessions until this one exists.

        Only the hosted service has such pages. For other servers, return the base URL.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     url = service.get_console_url()
        >>> url.startswith("http")
        True
        """
        settings = self._runtime.settings
        if not settings.is_vendor_host:
            return settings.base_url
        session_id = self._runtime.server.known_session_id
        return sessions_url() if session_id is None else session_url(session_id)

    @overload
    def get_tokenizer(self, model: str, *, backend: Literal["tokenizers"] = "tokenizers") -> Tokenizer: ...
    @overload
    def get_tokenizer(self, model: str, *, backend: Literal["transformers"]) -> Any: ...
    def get_tokenizer(
        self, model: str, *, backend: Literal["tokenizers", "transformers"] = "tokenizers"
    ) -> Any:
        """Return the tokenizer of a model. Blocks. The process keeps the last 32 tokenizers in memory.

        Args:
            model: the name of a base model, or the path of weights, ``tinker://…``, whose base model the
                server names.
            backend: "transformers" returns an object of that library, which must be installed.

        Raises:
            TokenizerError: the tokenizer cannot be loaded; the message names the files to provide.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     tokenizer = service.get_tokenizer("tinker-sync/tiny")
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     tokenizer.decode([20, 223, 14]), service.get_tokenizer(path) is tokenizer
        ('2 ,', True)
        """
        from tinker_sync.data.tokenizer import get_tokenizer

        if model.startswith("tinker://"):
            model = self.create_rest_client().get_weights_info_by_tinker_path(model).result().base_model
        return get_tokenizer(model, backend=backend)

    # -------------------------------------------------------------------------------------- the end

    def close(
        self,
        status: Literal["success", "errored", "interrupted"] = "success",
        detail: str | None = None,
        *,
        timeout: float = CLOSE_LIMIT_S,
        pending: float = PENDING_LIMIT_S,
    ) -> APIFuture[None]:
        """Begin to close this client and to end its session. Return a future that ends when both are done.

        Later calls of the clients made here raise `ClientClosedError`.

        `close` waits for calls that change something at the server (`optim_step`, saves,
        `publish_checkpoint`, deletions, ...). A pass is sent if such a call follows it; a pass without one
        has no lasting effect, so `close` does not wait for it. Calls that only read fail at once. The end of
        a ``with`` block or of the script closes the client in the same way. After 2 s a line on stderr names
        the calls that `close` waits for; Ctrl-C stops the wait at once. A ``with`` block or a script that
        Ctrl-C ends is left within two seconds, and a warning names the calls that may be lost.

        Args:
            status: the outcome of the session.
            detail: a note about it.
            timeout: the longest time to try to end the session at the server, seconds.
            pending: the longest time to wait for calls, seconds; a warning names the calls that remain.

        Raises:
            OSError: the file of `trace` cannot be written; the client closes all the same. The end of a
                ``with`` block raises it when the client is closed, and logs it behind an error of the block.

        >>> import tinker_sync
        >>> service = tinker_sync.ServiceClient(base_url="local")
        >>> models = service.get_server_capabilities()
        >>> service.close().result()
        """
        try:
            with ExitStack() as recordings:  # one of the traces may not be writable
                for recording in self._recordings:
                    recordings.callback(recording.close)
        finally:
            closed = self._runtime.close(status, detail, limit_s=timeout, pending_s=pending)
        return closed

    def __enter__(self) -> Self:
        if self._runtime.closed:
            raise ClientClosedError("this ServiceClient is closed and cannot be entered; make a new one")
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        limit_s, pending_s, most_s = CLOSE_LIMIT_S, PENDING_LIMIT_S, None
        if exc_type is not None and issubclass(
            exc_type, KeyboardInterrupt
        ):  # leave soon, also if a thread is stuck
            limit_s, pending_s = exits.EXIT_LIMIT_S, exits.INTERRUPTED_LIMIT_S
            most_s = limit_s + pending_s
        try:
            try:
                self.close(_status_after(exc_type), timeout=limit_s, pending=pending_s)
            finally:  # a trace may not be writable
                self._leave(most_s)
        except KeyboardInterrupt:
            self._runtime.lifecycle.pending.give_up()
            raise
        except OSError as error:
            if exc_type is None:
                raise
            _log.warning("a trace cannot be written: %s", error)  # the error of the block goes first

    def _leave(self, most_s: float | None) -> None:
        try:
            self._runtime.close().result(most_s)
        except TimeoutError:
            exits.forget(self._runtime.lifecycle)  # it has had its time

    def result(self, timeout: float | None = None) -> Self:
        """Return this client at once. For scripts that wait for each client as for a future.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     service.result() is service
        True
        """
        del timeout
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ServiceClient belongs to its process and cannot be pickled or copied; "
            "make one in the other process, or send a SamplingClient, which can be pickled"
        )

    get_tokenizer_async = async_blocking(get_tokenizer)
    get_server_capabilities_async = async_blocking(get_server_capabilities)


def _status_after(exc_type: type[BaseException] | None) -> Literal["success", "errored", "interrupted"]:
    if exc_type is None:
        return "success"
    return "errored" if issubclass(exc_type, Exception) else "interrupted"


def _refuse_mistyped(unknown: Mapping[str, Any]) -> None:
    """Refuse keywords that resemble a parameter.

    Ignoring a misspelt `base_url` would send the key to another server than intended.

    Raises:
        TypeError: a keyword resembles a parameter, or is one of an earlier version.
    """
    import inspect  # needed only for a misspelt name

    refuse_arguments("ServiceClient", unknown)
    parameters = [name for name in inspect.signature(ServiceClient.__init__).parameters if name != "unknown"]
    parameters.remove("self")
    for name in unknown:
        if find_closest(name, parameters, cutoff=0.8, loosely=False):
            raise TypeError(describe_unknown_parameter("ServiceClient", name, parameters))
