"""`Gateway`: chats of agents become prompts, samples and exchanges.

A request names the whole chat. The gateway looks for the longest beginning of it that it knows, which ends
with an answer that it has sampled, and goes on from that conversation, so that its tokens stay as they are.
Chats are compared by what they say: the ids of calls and the reasoning, which agents may drop, do not matter.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import lru_cache
from hashlib import blake2b
from http import HTTPStatus
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, Protocol
from urllib.parse import quote, unquote

from attrs import define

from tinker_sync._base.clock import make_lock
from tinker_sync._base.jsonl import append_line, read_lines
from tinker_sync._base.log import Log
from tinker_sync._base.secret import Secret, is_loopback
from tinker_sync.data.conversation import Conversation, Turn, cut_at
from tinker_sync.errors import (
    APIStatusError,
    ConfigurationError,
    DeadlineError,
    InvalidInputError,
    RequestErrorCategory,
    RequestFailedError,
    TinkerError,
)
from tinker_sync.gateway import anthropic, openai
from tinker_sync.gateway.exchanges import (
    Answer,
    Asked,
    Exchange,
    Trajectory,
    to_trajectories,
)
from tinker_sync.gateway.http import PASSING, Connection, Gone, Refusal, Reply, Server
from tinker_sync.types import ModelInput, SampleResponse, SamplingParams
from tinker_sync.wire.http1.server import RequestHead

_log = Log("tinker_sync.gateway")

SHORTEST_REMOTE_KEY: Final = 16
"""The fewest characters of a key that other machines can try."""
_NEAR: Final = ("internal", "lan", "local", "localhost")
"""Last parts of names that are given to machines nearby; containers reach theirs as host.docker.internal."""
_KEPT_FOR_FILE: Final = 2048
"""The most conversations that can go on while exchanges are written to a file, which bounds the memory."""


class Sampler(Protocol):
    """The part of a sampling client that a gateway uses."""

    @property
    def sample(self) -> Callable[..., Future[SampleResponse]]:
        """The method that starts a sample."""

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of the model."""

    def get_base_model(self) -> str:
        """Return the name of the base model."""


@define
class _Known:
    """A conversation that may go on, and the id of its last exchange."""

    conversation: Conversation
    name: str
    continued: bool = False


class Gateway:
    """A server of chat endpoints that samples through a client and keeps the exact tokens. Thread-safe.

    `SamplingClient.endpoint` makes one. It serves ``/v1/chat/completions``, ``/v1/completions`` and
    ``/v1/models`` of OpenAI, and ``/v1/messages`` and ``/v1/messages/count_tokens`` of Anthropic. A streamed
    answer arrives in one piece, when all of it has been sampled, because the server of the samples does not
    stream.

    Args:
        sampling: the client that samples.
        host: the address to listen on.
        port: the port, or 0 for a free one.
        key: the key that agents must send. Needed for an address that other machines can reach; it then needs
            16 characters.
        sampling_params: what a request does not set, such as `max_tokens` and `temperature`.
        chat_template: another template than the model's, or the name of one of the model's.
        record: a file to which exchanges are appended as JSON lines; None: they are kept in memory.
        deadline: seconds until a sample gives up; None: the default of the client.

    Raises:
        ConfigurationError: the address cannot be used, or the key is missing or too short.
        InvalidInputError: `sampling_params` has tokens as its `stop`.
        TokenizerError: the tokenizer of the model cannot be loaded.

    >>> import json, urllib.request
    >>> import tinker_sync
    >>> with tinker_sync.ServiceClient(base_url="local") as service:
    ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
    ...     with sampling.endpoint() as gateway:
    ...         asked = {"messages": [{"role": "user", "content": "What is 23+45?"}], "temperature": 0}
    ...         url = f"{gateway.openai_base_url()}/chat/completions"
    ...         with urllib.request.urlopen(url, json.dumps(asked).encode()) as answer:
    ...             print(json.load(answer)["choices"][0]["message"]["content"])
    ...         [trajectory] = gateway.trajectories()
    23+45=68
    >>> trajectory.datum(1.0).loss_fn_inputs["advantages"].to_numpy()[-2:].tolist()
    [1.0, 1.0]
    """

    def __init__(
        self,
        sampling: Sampler,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        key: str | None = None,
        sampling_params: SamplingParams | None = None,
        chat_template: str | None = None,
        record: str | os.PathLike[str] | None = None,
        deadline: float | None = None,
    ) -> None:
        if not is_loopback(host) and len(key or "") < SHORTEST_REMOTE_KEY:
            raise ConfigurationError(
                f"{host!r} can be reached from other machines: give a key of at least {SHORTEST_REMOTE_KEY} "
                "characters, or listen on 127.0.0.1"
            )
        self._key = Secret(key) if key else None
        self._defaults = sampling_params or SamplingParams()
        self._stop = _texts_of(self._defaults.stop)
        self._template = chat_template
        self._deadline = deadline
        self._tokenizer = sampling.get_tokenizer()
        self._model = sampling.get_base_model()
        if record is not None:
            Path(record).parent.mkdir(parents=True, exist_ok=True)
        self._file = None if record is None else open(record, "a+b", buffering=0)  # noqa: SIM115  # close
        self._record = None if record is None else Path(record)
        self._start = self._measure_file()  # what is before this byte of the file has been forgotten
        self._lock = make_lock()
        self._current: tuple[Sampler, Any] = sampling, 0  # replaced as a whole
        self._used = 0  # guarded by _lock; the number of `use` calls
        self._known: OrderedDict[bytes, list[_Known]] = OrderedDict()  # guarded by _lock; by what was said
        self._exchanges: list[Exchange] = []  # guarded by _lock
        self._noted: set[str] = set()  # guarded by _lock
        self._params = lru_cache(256, typed=True)(self._make_params)
        self._name, self._numbers = token_hex(8), count()  # random octets for each answer are a system call
        self._host = host
        try:
            self._server = Server(self._answer, host, port)
        except ConfigurationError:
            self._close_file()
            raise

    # -------------------------------------------------------------------------------------- addresses

    @property
    def url(self) -> str:
        """The address of the gateway."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._host, self._host)  # noqa: S104  # to connect to
        return f"http://{f'[{host}]' if ':' in host else host}:{self._server.port}"

    def openai_base_url(self, label: str = "") -> str:
        """Return the `base_url` for clients of OpenAI's API.

        Args:
            label: a name that the exchanges of this address get, such as that of a task or an agent. Chats
                with different labels are never taken for one another, even if they say the same.

        Raises:
            InvalidInputError: the label is no text, or is "." or "..", which programs drop from an address.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     with sampling.endpoint() as gateway:
        ...         gateway.openai_base_url("task-7").removeprefix(gateway.url)
        '/task-7/v1'
        """
        return f"{self.anthropic_base_url(label)}/v1"

    def anthropic_base_url(self, label: str = "") -> str:
        """Return the `base_url` for clients of Anthropic's API.

        Args:
            label: as in `openai_base_url`.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     with sampling.endpoint() as gateway:
        ...         gateway.anthropic_base_url("task-7").removeprefix(gateway.url)
        '/task-7'
        """
        if not isinstance(label, str):
            raise InvalidInputError(f"label: expected text, got {label!r}; give str({label!r})")
        if label in (".", ".."):
            raise InvalidInputError(f"label: {label!r} would vanish from the address; give another one")
        return f"{self.url}/{quote(label, safe='')}" if label else self.url

    # -------------------------------------------------------------------------------------- weights, records

    def use(self, sampling: Sampler, version: Any = None) -> None:
        """Sample with other weights of the same model from now on. Samples under way go on with theirs.

        Args:
            sampling: the client of the weights.
            version: what exchanges have as their `version`, any value that JSON has; None: how often `use`
                has been called. The weights of the start are version 0.

        Raises:
            InvalidInputError: `sampling` is no client that samples; the weights stay as they are.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     with training.save_weights_and_get_sampling_client().endpoint() as gateway:
        ...         gateway.use(training.save_weights_and_get_sampling_client())
        """
        if not hasattr(sampling, "sample"):
            raise InvalidInputError(
                f"use: expected a sampling client, got {type(sampling).__name__}; such as "
                "training.save_weights_and_get_sampling_client() or service.create_sampling_client(path)"
            )
        with self._lock:
            self._used += 1
            self._current = sampling, self._used if version is None else version

    def exchanges(self, label: str | None = None) -> list[Exchange]:
        """Return the exchanges since the start, or since `clear`, in the order in which they were answered.

        Those of earlier gateways in the same file are left out; `read_exchanges` reads the whole file.

        Args:
            label: only those of this label; None: all.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     with sampling.endpoint() as gateway:
        ...         gateway.exchanges()
        []
        """
        if self._record is not None:
            found = [Exchange.from_plain(line) for _, line in read_lines(self._record, self._start)]
        else:
            with self._lock:
                found = list(self._exchanges)
        return [each for each in found if label is None or each.label == label]

    def trajectories(self, label: str | None = None) -> list[Trajectory]:
        """Return the conversations of `exchanges`, each with the data for training.

        Args:
            label: only those of this label; None: all.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     with sampling.endpoint() as gateway:
        ...         gateway.trajectories("task-7")
        []
        """
        return to_trajectories(self.exchanges(label))

    def clear(self) -> None:
        """Forget all exchanges, for example after a step of the training. The file of `record` keeps them.

        A conversation that goes on afterwards begins a new trajectory.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     with sampling.endpoint() as gateway:
        ...         gateway.clear()
        """
        start = self._measure_file()
        with self._lock:
            self._exchanges, self._start = [], start
            self._known.clear()

    def close(self) -> None:
        """Stop serving: end the connections, and cancel their samples. Idempotent.

        The exchanges can still be read.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     gateway = service.create_sampling_client(base_model="tinker-sync/tiny").endpoint()
        ...     gateway.close()
        """
        self._server.close()
        self._close_file()

    def _measure_file(self) -> int:
        return 0 if self._record is None else self._record.stat().st_size

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Gateway {self.url}>"

    # -------------------------------------------------------------------------------------- requests

    def _answer(self, request: RequestHead, connection: Connection) -> Reply:
        """Answer a request. Runs on the thread of its connection."""
        prefix, _, route = request.path.rpartition("/v1/")
        form = anthropic if route.startswith("messages") or "anthropic-version" in request.headers else openai
        try:
            self._check_agent(request)
            return self._route(route, request, unquote(prefix.strip("/")), connection)
        except Gone:
            raise
        except Exception as error:  # noqa: BLE001  # an agent gets an answer whatever happens
            status, message = _explain(error)
            # The client of the samples has tried again as often as it makes sense.
            again = "true" if isinstance(error, Refusal) and status in PASSING else "false"
            return Reply(form.error(status, message), status, {"x-should-retry": again})

    def _check_agent(self, request: RequestHead) -> None:
        """Refuse agents without the key, or web pages if there is none. The body has not been read yet."""
        if self._key is None:
            if "origin" in request.headers:
                raise Refusal(403, "web pages may use this endpoint only with a key; start it with key=")
            if not _is_near(request.headers.get("host", "")):
                raise Refusal(403, "under a public name, this endpoint needs a key; start it with key=")
            return
        sent = request.headers.get("authorization", "").partition(" ")[2] or request.headers.get("x-api-key")
        if Secret(sent or "") != self._key:
            raise Refusal(401, "the key of this endpoint is missing or wrong; give it as the api_key")

    def _route(self, route: str, request: RequestHead, label: str, connection: Connection) -> Reply:
        if request.method in ("GET", "HEAD") and route.rstrip("/") == "models":
            return Reply(openai.models(self._model))
        if request.method in ("GET", "HEAD") and route.startswith("models/"):
            return Reply(openai.model(unquote(route.removeprefix("models/"))))
        found = {
            "chat/completions": self._openai_chat,
            "completions": self._openai_completion,
            "messages": self._anthropic_message,
            "messages/count_tokens": self._anthropic_count,
        }.get(route.rstrip("/"))
        if found is None:
            raise Refusal(404, f"there is no {request.method} {request.path} here")
        if request.method != "POST":
            raise Refusal(405, "use POST")
        tree = connection.read_json(request)
        if not isinstance(tree, dict):
            raise Refusal(400, "the body is not a JSON object")
        return found(tree, label, connection)

    def _openai_chat(self, tree: dict[str, Any], label: str, connection: Connection) -> Reply:
        asked = self._complete(openai.read_chat(tree))
        name = self._make_name("chatcmpl-")
        prompt, answers = self._converse(asked, name, label, connection)
        return Reply(openai.chat(name, tree, prompt, answers, self._tokenizer), headers=self._note(asked))

    def _anthropic_message(self, tree: dict[str, Any], label: str, connection: Connection) -> Reply:
        asked = self._complete(anthropic.read_message(tree))
        name = self._make_name("msg_")
        prompt, [answer] = self._converse(asked, name, label, connection)
        return Reply(anthropic.message(name, tree, prompt.length, answer), headers=self._note(asked))

    def _anthropic_count(self, tree: dict[str, Any], label: str, _connection: Connection) -> Reply:
        conversation, known, _ = self._conversation(anthropic.read_message(tree), label)
        if known is not None:
            known.continued = False
        return Reply({"input_tokens": conversation.prompt().length})

    def _openai_completion(self, tree: dict[str, Any], label: str, connection: Connection) -> Reply:
        asked, prompts = openai.read_completion(tree)
        self._complete(asked)
        params = self._params(tuple(asked.stop) or None, **asked.settings)
        sampler, version = self._current
        name = self._make_name("cmpl-")
        inputs = [
            ModelInput.from_text(each, self._tokenizer)
            if isinstance(each, str)
            else ModelInput.from_ints(each)
            for each in prompts
        ]
        futures = [self._sample(sampler, each, asked, params) for each in inputs]
        answers = []
        for given, future in zip(inputs, futures, strict=True):
            for sequence in connection.wait(future).sequences:
                text, found = cut_at(self._tokenizer.decode(sequence.tokens, True), asked.stop)
                answers.append((given, Answer({"role": "assistant", "content": text}, sequence, found)))
        self._keep(
            [
                Exchange(
                    _numbered(name, index, len(answers)),
                    Turn(given.to_ints(), answer.sequence, dict(answer.message)),
                    label=label,
                    version=version,
                    created=time.time(),
                )
                for index, (given, answer) in enumerate(answers)
            ]
        )
        return Reply(openai.completion(name, tree, inputs, [each for _, each in answers], self._tokenizer))

    def _note(self, asked: Asked) -> dict[str, str]:
        """Return a header that names what nothing enforces, and log each such setting once."""
        if not asked.unenforced:
            return {}
        for name in asked.unenforced:
            with self._lock:
                new = name not in self._noted
                self._noted.add(name)
            if new:
                _log.warning(
                    "%s: agents ask for it, but the model may do otherwise: nothing enforces it", name
                )
        return {"x-not-enforced": ", ".join(asked.unenforced)}

    def _complete(self, asked: Asked) -> Asked:
        asked.stop = asked.stop or self._stop
        return asked

    # -------------------------------------------------------------------------------------- conversations

    def _converse(
        self, asked: Asked, name: str, label: str, connection: Connection
    ) -> tuple[ModelInput, list[Answer]]:
        """Sample answers to a chat and keep them; return the prompt too."""
        conversation, known, digest = self._conversation(asked, label)
        before = len(known.conversation.messages) if known else 0
        sampler, version = self._current
        try:
            prompt = conversation.prompt()
            stop = conversation.stop_with(asked.stop) if asked.stop else conversation.stop
            params = self._params(tuple(stop), **asked.settings)
            response = connection.wait(self._sample(sampler, prompt, asked, params))
        except BaseException:
            if known is not None:
                known.continued = False  # the agent may ask again
            raise
        answers, kept, ended = [], [], []
        for index, sequence in enumerate(response.sequences):
            fork = conversation if asked.n == 1 else conversation.fork()
            message = fork.add_sampled(sequence, stop=asked.stop)
            answers.append(Answer(message, sequence, fork.turns[-1].stopped_at))
            exchange = Exchange(
                _numbered(name, index, asked.n),
                fork.turns[-1],
                fork.messages[before:-1],
                known.name if known else None,
                label,
                version,
                time.time(),
            )
            kept.append(exchange)
            ended.append((_add_message(digest, message), _Known(fork, exchange.id)))
        self._keep(kept, ended)
        return prompt, answers

    def _conversation(self, asked: Asked, label: str) -> tuple[Conversation, _Known | None, bytes]:
        """Return the conversation that a request continues, with its new messages, and a digest of it all."""
        if not asked.messages:
            raise InvalidInputError("messages: is empty")
        if asked.messages[-1].get("role") == "assistant":
            raise InvalidInputError(
                "messages: the last one is the assistant's; an answer cannot be continued"
            )
        digest = _digest(b"", (label, asked.tools, asked.variables))
        digests = []
        for message in asked.messages:
            digest = _add_message(digest, message)
            digests.append(digest)
        known, count = None, 0
        with self._lock:
            for index in range(len(digests) - 1, -1, -1):
                if asked.messages[index]["role"] == "assistant" and digests[index] in self._known:
                    self._known.move_to_end(digests[index])
                    same = self._known[digests[index]]
                    # Of equal conversations each goes on by itself, with the tokens of its own.
                    known = next((each for each in same if not each.continued), same[-1])
                    known.continued, count = True, index + 1
                    break
        if known is None:
            conversation = Conversation(
                self._tokenizer, tools=asked.tools, chat_template=self._template, **asked.variables
            )
        else:
            conversation = known.conversation.fork()
        conversation.add(*asked.messages[count:])
        return conversation, known, digest

    def _keep(self, exchanges: list[Exchange], ended: Iterable[tuple[bytes, _Known]] = ()) -> None:
        if isinstance(self._file, io.FileIO):
            for exchange in exchanges:
                append_line(self._file, exchange.to_plain())
        with self._lock:
            for digest, known in ended:
                self._known.setdefault(digest, []).append(known)
            if self._file is None:
                self._exchanges += exchanges
            else:
                while len(self._known) > _KEPT_FOR_FILE:
                    self._known.popitem(last=False)

    def _sample(
        self, sampler: Sampler, prompt: ModelInput, asked: Asked, params: SamplingParams
    ) -> Future[SampleResponse]:
        return sampler.sample(
            prompt, asked.n, params, topk_sample_logprobs=asked.topk, deadline=self._deadline
        )

    def _make_name(self, kind: str) -> str:
        return f"{kind}{self._name}{next(self._numbers):08x}"

    def _make_params(self, stop: tuple[Any, ...] | None, **settings: Any) -> SamplingParams:
        """Return the parameters of a sample. Equal ones are one object, for which a client is quicker."""
        given = settings if stop is None else {**settings, "stop": list(stop)}
        return SamplingParams(**{**self._defaults.model_dump(), **given})


def _is_near(address: str) -> bool:
    """Return True unless a request was sent to a name that anybody could register.

    A web page can give its own name the address of this machine (DNS rebinding), and a browser then takes the
    endpoint for a part of the page.
    """
    host = address.rpartition(":")[0] or address
    name, _, last = host.rstrip(".").lower().rpartition(".")
    return not name or host.startswith("[") or last.isdigit() or last in _NEAR


def _texts_of(stop: Any) -> list[str]:
    texts = [stop] if isinstance(stop, str) else list(stop or ())
    if not all(isinstance(text, str) for text in texts):
        raise InvalidInputError(
            "sampling_params.stop: expected texts; the chat template tells which tokens end an answer"
        )
    return texts


def _add_message(digest: bytes, message: Mapping[str, Any]) -> bytes:
    """Return the digest of a chat with one more message."""
    calls = [
        (call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls") or ()
    ]
    return _digest(digest, (message["role"], (message.get("content") or "").strip(), calls))


def _digest(before: bytes, said: Any) -> bytes:
    return blake2b(before + repr(said).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _numbered(name: str, index: int, count: int) -> str:
    return name if count == 1 else f"{name}-{index}"


def _explain(error: Exception) -> tuple[int, str]:
    """Return the status and the text for an agent whose request has failed."""
    if isinstance(error, Refusal):
        return error.status, str(error)
    if isinstance(error, InvalidInputError) or (
        isinstance(error, RequestFailedError) and error.category is RequestErrorCategory.User
    ):
        return HTTPStatus.BAD_REQUEST, str(error)
    if isinstance(error, DeadlineError):
        return HTTPStatus.GATEWAY_TIMEOUT, str(error)
    if isinstance(error, APIStatusError):
        # A key that the server refuses is the gateway's, not the agent's.
        refused = error.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
        return HTTPStatus.BAD_GATEWAY if refused else error.status_code, str(error)
    if isinstance(error, TinkerError):
        return HTTPStatus.SERVICE_UNAVAILABLE, f"{type(error).__name__}: {error}"
    return HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}"
