"""`RestClient`: calls about runs, checkpoints, sessions, files and the account."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterable
from datetime import date, datetime
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from attrs import frozen

from tinker_sync import types
from tinker_sync._base.lazy import LazyModule
from tinker_sync._base.log import Log
from tinker_sync._base.naming import carried, find_call_site, names_requests, warn_caller
from tinker_sync._base.secret import Secret, mask_text
from tinker_sync.clients._async import async_result
from tinker_sync.clients._base import REST_S
from tinker_sync.clients.rest._base import (
    AccessScope,
    RestBase,
    call_offered,
    checked_id,
    checked_scope,
    parse_path,
    warn_experimental,
)
from tinker_sync.clients.rest.admin import AdminClient, AuditEvents
from tinker_sync.clients.rest.bulk import PARALLEL, Bulk, CheckpointOutcome, Listener, Paths, gone_by_us
from tinker_sync.clients.rest.listing import Listing, Page
from tinker_sync.errors import (
    InvalidInputError,
    TinkerError,
    UnsupportedByServerError,
    WireError,
)
from tinker_sync.runtime.calls import make_call, odd_answer
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.workers import Workers
from tinker_sync.transport.call import Reply
from tinker_sync.types._checks import as_whole
from tinker_sync.types._structured import short_repr
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from tinker_sync.clients.rest import _sources
    from tinker_sync.transport.files import download as _download
    from tinker_sync.transport.files import progress as _progress
    from tinker_sync.transport.files import signed as _signed
    from tinker_sync.transport.files import upload as _upload
    from tinker_sync.transport.files.download import CheckpointDownload
    from tinker_sync.transport.files.progress import TransferProgress
    from tinker_sync.transport.files.signed import Cancellation
    from tinker_sync.types import (
        AuditLogResponse,
        BillingUsageResponse,
        Checkpoint,
        CheckpointSearchRequest,
        CheckpointSearchResponse,
        CheckpointsListResponse,
        CopyWeightsResponse,
        CurrentCheckpointStorageUsageResponse,
        ExternalWeightsUploadFinishResult,
        ExternalWeightsUploadStartResult,
        ExternalWeightsUrlsResponse,
        GetSamplerResponse,
        GetServerCapabilitiesResponse,
        GetSessionResponse,
        ListSessionsResponse,
        LoraConfig,
        SessionSearchRequest,
        SessionSearchResponse,
        TrainingRun,
        TrainingRunsResponse,
        WeightsInfoResponse,
        WhoamiResponse,
    )
else:  # most clients move no files
    _sources = LazyModule("tinker_sync.clients.rest._sources")
    _download = LazyModule("tinker_sync.transport.files.download")
    _progress = LazyModule("tinker_sync.transport.files.progress")
    _signed = LazyModule("tinker_sync.transport.files.signed")
    _upload = LazyModule("tinker_sync.transport.files.upload")


T = TypeVar("T")

MAX_PARTS = 64
_TRACE_POLL_S: Final = 5.0
# Exports take minutes; the server has forgotten one that takes longer than this.
_TRACE_LIMIT_S: Final = 3600.0

_log = Log(__name__)


@frozen
class CheckpointArchiveUrl:
    """The address of an archive, which gives access without a key until `expires`.

    >>> CheckpointArchiveUrl("https://host/a.tar.gz?signature=s", datetime(2026, 1, 1)).expires.year
    2026
    """

    url: str
    expires: datetime

    def __repr__(self) -> str:
        return f"CheckpointArchiveUrl(url='{self.url.partition('?')[0]}…', expires={self.expires!r})"


class TraceFailedError(TinkerError, RuntimeError):
    """The error for a trace that the server could not write.

    It is also a RuntimeError, which the reference client raises.
    """


class UnknownOwnerError(UnsupportedByServerError, RuntimeError):
    """The error for a key whose owner is not known.

    It is also a RuntimeError, which the reference client raises.
    """


@names_requests
class RestClient(RestBase):
    """A client for runs, checkpoints, sessions and their files. Thread-safe.

    The `iter_...` methods return iterators; the others return futures, and their calls are sent in parallel.
    Clients that are made without a service client, for the same server and key, share their connections.
    `RestClient(service.holder)`, without further arguments, uses the connections of a service client.

    Args:
        base_url: the server; None: `TINKER_BASE_URL`, else the hosted service.
        api_key: the key; None: `TINKER_API_KEY`, else from `TINKER_CREDENTIAL_CMD`, else the stored one.
    """

    # -------------------------------------------------------------------------------------- runs

    def get_training_run(
        self, training_run_id: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        """Return a run.

        Args:
            training_run_id: the id of the run, which is the model id too.
            access_scope: "accessible" also finds shared runs of other users.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     rest = service.create_rest_client()
        ...     rest.get_training_run(training.model_id).result().base_model
        'tinker-sync/tiny'
        """
        return self._call(
            "get_training_run",
            path={"run": checked_id("training_run_id", training_run_id)},
            query={"access_scope": checked_scope(access_scope)},
        )

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[TrainingRun]:
        """Return the run of a checkpoint. Arguments as in `get_training_run`.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     rest = service.create_rest_client()
        ...     rest.get_training_run_by_tinker_path(path).result().training_run_id == training.model_id
        True
        """
        return self.get_training_run(parse_path(self._runtime, tinker_path).training_run_id, access_scope)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: AccessScope = "owned",
        project_id: str | None = None,
    ) -> APIFuture[TrainingRunsResponse]:
        """Return a page of runs, usually the newest first.

        Args:
            limit: the largest number of entries.
            offset: the number of entries before the page.
            access_scope: "accessible" also lists shared runs of other users.
            project_id: return only runs of this project.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     model_id = training.model_id  # waits until it exists
        ...     runs = service.create_rest_client().list_training_runs(limit=5).result().training_runs
        ...     model_id in [run.training_run_id for run in runs]
        True
        """
        return self._call(
            "list_training_runs",
            query={
                "limit": limit,
                "offset": offset,
                "access_scope": checked_scope(access_scope),
                "project_id": project_id,
            },
        )

    def iter_training_runs(
        self, *, limit: int | None = None, access_scope: AccessScope = "owned", project_id: str | None = None
    ) -> Listing[TrainingRun]:
        """Iterate over all runs. The next page is fetched while you use the present one.

        An entry that exists all the time comes exactly once, also if others appear or vanish meanwhile. After
        the first entry, `total` of the iterator is the number of runs.

        Args:
            limit: the largest number of entries; None: all.
            access_scope: "accessible" also lists shared runs of other users.
            project_id: return only runs of this project.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     model_id = training.model_id  # waits until it exists
        ...     runs = service.create_rest_client().iter_training_runs()
        ...     model_id in [run.training_run_id for run in runs]
        True
        """
        checked_scope(access_scope)
        return Listing(
            lambda size, offset: self.list_training_runs(size, offset, access_scope, project_id),
            lambda answer: Page(answer.training_runs, answer.cursor.total_count),
            attrgetter("training_run_id"),
            limit=limit,
        )

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> APIFuture[WeightsInfoResponse]:
        """Return the base model, the rank and the trained layers of a checkpoint.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     rest = service.create_rest_client()
        ...     rest.get_weights_info_by_tinker_path(path).result().lora_rank
        4
        """
        return self._call("get_weights_info", {"tinker_path": tinker_path})

    def get_sampler(self, sampler_id: str) -> APIFuture[GetSamplerResponse]:
        """Return the base model of a sampler, and the path of its weights.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     rest = service.create_rest_client()
        ...     rest.get_sampler(sampling.sampling_session_id).result().base_model
        'tinker-sync/tiny'
        """
        return self._call("get_sampler", path={"sampler": checked_id("sampler_id", sampler_id)})

    # -------------------------------------------------------------------------------------- checkpoints

    def list_checkpoints(self, training_run_id: str) -> APIFuture[CheckpointsListResponse]:
        """Return all checkpoints of a run.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     rest = service.create_rest_client()
        ...     [each.checkpoint_id for each in rest.list_checkpoints(training.model_id).result().checkpoints]
        ['weights/final']
        """
        return self._call("list_checkpoints", path={"run": checked_id("training_run_id", training_run_id)})

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> APIFuture[CheckpointsListResponse]:
        """Return a page of the list of all your checkpoints.

        Args:
            limit: the largest number of entries.
            offset: the number of entries before the page.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     rest = service.create_rest_client()
        ...     listed = rest.list_user_checkpoints(limit=10).result().checkpoints
        ...     path in [each.tinker_path for each in listed]
        True
        """
        return self._call("list_user_checkpoints", query={"limit": limit, "offset": offset})

    def iter_checkpoints(self, training_run_id: str, *, limit: int | None = None) -> Listing[Checkpoint]:
        """Iterate over all checkpoints of a run.

        Args:
            training_run_id: the id of the run.
            limit: the largest number of entries; None: all.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     rest = service.create_rest_client()
        ...     [each.checkpoint_id for each in rest.iter_checkpoints(training.model_id)]
        ['weights/final']
        """
        checked_id("training_run_id", training_run_id)
        return Listing(
            lambda size, offset: self.list_checkpoints(training_run_id),  # noqa: ARG005  # it has no pages
            lambda answer: Page(answer.checkpoints, len(answer.checkpoints)),
            attrgetter("tinker_path"),
            limit=limit,
        )

    def iter_user_checkpoints(self, *, limit: int | None = None) -> Listing[Checkpoint]:
        """Iterate over all your checkpoints. The next page is fetched while you use the present one.

        An entry that exists all the time comes exactly once, also if others appear or vanish meanwhile. After
        the first entry, `total` of the iterator is the number of checkpoints.

        Args:
            limit: the largest number of entries; None: all.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     rest = service.create_rest_client()
        ...     path in [each.tinker_path for each in rest.iter_user_checkpoints()]
        True
        """
        return Listing(
            self.list_user_checkpoints,
            lambda answer: Page(answer.checkpoints, answer.cursor.total_count if answer.cursor else None),
            attrgetter("tinker_path"),
            limit=limit,
        )

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> APIFuture[None]:
        """Delete a checkpoint permanently.

        Args:
            training_run_id: the id of the run.
            checkpoint_id: the folder and the name, such as "weights/step-100".

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     rest = service.create_rest_client()
        ...     rest.delete_checkpoint(training.model_id, "weights/final").result()
        ...     list(rest.iter_checkpoints(training.model_id))
        []
        """
        return self._call("delete_checkpoint", path=_checked_place(training_run_id, checkpoint_id))

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Delete a checkpoint permanently.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     rest = service.create_rest_client()
        ...     rest.delete_checkpoint_from_tinker_path(path).result()
        ...     list(rest.iter_checkpoints(training.model_id))
        []
        """
        return self._on_path("delete_checkpoint", tinker_path)

    def publish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Make a checkpoint readable for all users.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     rest = service.create_rest_client()
        ...     rest.publish_checkpoint_from_tinker_path(path).result()
        ...     [each.public for each in rest.iter_checkpoints(training.model_id)]
        [True]
        """
        return self._on_path("publish_checkpoint", tinker_path)

    def unpublish_checkpoint_from_tinker_path(self, tinker_path: str) -> APIFuture[None]:
        """Make a checkpoint private again.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     rest = service.create_rest_client()
        ...     rest.publish_checkpoint_from_tinker_path(path).result()
        ...     rest.unpublish_checkpoint_from_tinker_path(path).result()
        ...     [each.public for each in rest.iter_checkpoints(training.model_id)]
        [False]
        """
        return self._on_path("unpublish_checkpoint", tinker_path)

    def set_checkpoint_ttl_from_tinker_path(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> APIFuture[None]:
        """Set the number of seconds after which a checkpoint is deleted; None keeps it.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     rest = service.create_rest_client()
        ...     rest.set_checkpoint_ttl_from_tinker_path(path, 86400).result()
        ...     [each.expires_at is None for each in rest.iter_checkpoints(training.model_id)]
        [False]
        """
        return self._on_path("set_checkpoint_ttl", tinker_path, {"ttl_seconds": ttl_seconds})

    def get_external_weights_urls(self, tinker_path: str) -> APIFuture[ExternalWeightsUrlsResponse]:
        """Return signed addresses of the files of an exported checkpoint, with the time of their expiry.

        Raises:
            InvalidInputError: the path is not ``tinker://RUN/external_weights/NAME``.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_weights_external("mine").result().path
        ...     rest = service.create_rest_client()
        ...     sorted(rest.get_external_weights_urls(path).result().urls)
        ['adapter_config.json', 'adapter_model.safetensors']
        """
        parsed = parse_path(self._runtime, tinker_path)
        if parsed.checkpoint_type != "external":
            raise InvalidInputError(f"{tinker_path!r}: expected tinker://RUN/external_weights/NAME")
        return self._call(
            "get_external_weights_urls",
            path={"run": parsed.training_run_id, "name": parsed.checkpoint_id.partition("/")[2]},
        )

    def copy_weights(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> APIFuture[str]:
        """Copy a checkpoint into a project. The future has the path of the copy.

        Args:
            path: the path of the checkpoint.
            destination_project_id: the project; None: that of this client, by default `TINKER_PROJECT_ID`.
            ttl_seconds: the number of seconds after which the copy is deleted.
            weights_access_token: a key of another account that may read the checkpoint.

        Raises:
            InvalidInputError: there is no project.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     rest = service.create_rest_client()
        ...     copy = rest.copy_weights(path, "project-2").result()
        ...     service.create_training_client_from_state(copy).get_info().lora_rank
        4
        """
        weights_access_token = self._runtime.connection.mask(weights_access_token)
        project = destination_project_id or self._runtime.settings.project_id
        if not project:
            raise InvalidInputError("copy_weights: give destination_project_id, or set TINKER_PROJECT_ID")
        request = types.CopyWeightsRequest(
            destination_project_id=project, source_path=path, ttl_seconds=ttl_seconds
        )
        headers = {"X-Idempotency-Key": str(uuid.uuid4())}
        if weights_access_token:
            headers["X-Tinker-Weights-Access-Token"] = weights_access_token

        def copy() -> str:
            deadline_at = self._runtime.clock.now() + REST_S
            copied: CopyWeightsResponse = self._runtime.server.call(
                "copy_weights", request, headers=headers, deadline_at=deadline_at
            )
            return copied.tinker_path

        return self._later(copy, changes=True)

    def search_checkpoints(self, request: CheckpointSearchRequest) -> APIFuture[CheckpointSearchResponse]:
        """Return a page of the checkpoints that match a request, the newest first. Experimental.

        The service may change the search. The future fails with `UnsupportedByServerError` if the server has
        none.

        >>> import tinker_sync, warnings
        >>> warnings.simplefilter("ignore", tinker_sync.ExperimentalWarning)
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     request = tinker_sync.types.CheckpointSearchRequest()
        ...     found = service.create_rest_client().search_checkpoints(request).result()
        >>> found.checkpoints[0].tinker_path == path
        True
        """
        warn_experimental("search_checkpoints")
        return self._call("search_checkpoints", request)

    def external_weights_upload_start(
        self, *, base_model: str, lora_config: LoraConfig, destination_project_id: str | None = None
    ) -> APIFuture[ExternalWeightsUploadStartResult]:
        """Begin the upload of an adapter, and return the address for each file. Experimental.

        `upload_external_weights` does the whole upload. This call is its first step. Afterwards, send each
        file to its address with PUT, and call `external_weights_upload_finish`.

        Args:
            base_model: the base model of the adapter.
            lora_config: the shape of the adapter.
            destination_project_id: the project; None: that of this client, else the default project.

        >>> import tinker_sync, warnings
        >>> warnings.simplefilter("ignore", tinker_sync.ExperimentalWarning)
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     adapter = {"base_model": "tinker-sync/tiny", "lora_config": tinker_sync.LoraConfig(rank=4)}
        ...     begun = service.create_rest_client().external_weights_upload_start(**adapter).result()
        >>> sorted(begun.urls)
        ['adapter_config.json', 'adapter_model.safetensors']
        """
        warn_experimental("external_weights_upload_start")
        request = types.ExternalWeightsUploadStartRequest(
            base_model=base_model,
            lora_config=lora_config,
            destination_project_id=destination_project_id or self._runtime.settings.project_id,
        )
        return self._call("external_weights_upload_start", request)

    def external_weights_upload_finish(self, upload_id: str) -> APIFuture[ExternalWeightsUploadFinishResult]:
        """Make a checkpoint from an upload. All its files must have been sent. Experimental.

        Args:
            upload_id: the id that `external_weights_upload_start` returned.

        >>> import tinker_sync, warnings
        >>> warnings.simplefilter("ignore", tinker_sync.ExperimentalWarning)
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     rest = service.create_rest_client()
        ...     adapter = {"base_model": "tinker-sync/tiny", "lora_config": tinker_sync.LoraConfig(rank=4)}
        ...     upload_id = rest.external_weights_upload_start(**adapter).result().upload_id
        ...     try:
        ...         rest.external_weights_upload_finish(upload_id).result()
        ...     except tinker_sync.ConflictError as error:
        ...         "adapter_config.json has not been put yet" in str(error)
        True
        """
        warn_experimental("external_weights_upload_finish")
        request = types.ExternalWeightsUploadFinishRequest(upload_id=checked_id("upload_id", upload_id))
        return self._call("external_weights_upload_finish", request)

    def get_checkpoint_archive_url(
        self, training_run_id: str, checkpoint_id: str
    ) -> APIFuture[CheckpointArchiveUrl]:
        """Return the address of a checkpoint's archive. Only older and open servers offer archives.

        Args:
            training_run_id: the id of the run.
            checkpoint_id: the folder and the name, such as "sampler_weights/step-100".

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_weights_for_sampler("final").result().path
        ...     rest = service.create_rest_client()
        ...     archive = rest.get_checkpoint_archive_url(training.model_id, "sampler_weights/final")
        ...     archive.result()  # doctest: +ELLIPSIS
        CheckpointArchiveUrl(url='http...final.tar.gz…', expires=...)
        """
        place = _checked_place(training_run_id, checkpoint_id)

        def ask() -> CheckpointArchiveUrl:
            from tinker_sync.clients.rest._sources import find_archive

            return CheckpointArchiveUrl(*find_archive(self._runtime, place["run"], place["checkpoint"]))

        return self._later(ask)

    def get_checkpoint_archive_url_from_tinker_path(
        self, tinker_path: str
    ) -> APIFuture[CheckpointArchiveUrl]:
        """Return the address of a checkpoint's archive, by path. Only older and open servers offer archives.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_weights_for_sampler("final").result().path
        ...     rest = service.create_rest_client()
        ...     rest.get_checkpoint_archive_url_from_tinker_path(path).result()  # doctest: +ELLIPSIS
        CheckpointArchiveUrl(url='http...final.tar.gz…', expires=...)
        """
        parsed = parse_path(self._runtime, tinker_path)
        return self.get_checkpoint_archive_url(parsed.training_run_id, parsed.checkpoint_id)

    def _on_path(self, name: str, tinker_path: str, request: Any = None) -> APIFuture[None]:
        parsed = parse_path(self._runtime, tinker_path)
        path = {"run": parsed.training_run_id, "checkpoint": parsed.checkpoint_id}
        return self._call(name, request, path=path)

    # -------------------------------------------------------------------------------------- many checkpoints

    def delete_checkpoints(
        self, paths: Paths, *, parallel: int = PARALLEL, progress: Listener | None = None
    ) -> APIFuture[list[CheckpointOutcome]]:
        """Delete checkpoints permanently. A failure of one does not affect the others.

        Args:
            paths: the paths of checkpoints, or checkpoints from a list.
            parallel: the most checkpoints that are deleted at a time.
            progress: called with `BulkProgress` after each checkpoint, on workers, so that several calls may
                run at a time.

        The result has an outcome for each path, in the order of `paths`. Equal paths share one outcome.

        Raises:
            InvalidInputError: `paths` is a single text, or `parallel` is less than 1.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     rest = service.create_rest_client()
        ...     every = rest.iter_checkpoints(training.model_id)
        ...     [outcome.ok for outcome in rest.delete_checkpoints(every).result()]
        [True]
        """
        return self._for_each("delete_checkpoint", None, paths, parallel, progress, gone_is_fine=True)

    def set_checkpoints_ttl(
        self,
        paths: Paths,
        ttl_seconds: int | None,
        *,
        parallel: int = PARALLEL,
        progress: Listener | None = None,
    ) -> APIFuture[list[CheckpointOutcome]]:
        """Set the number of seconds after which checkpoints are deleted; None keeps them.

        The other arguments, the result and the errors are as for `delete_checkpoints`.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     rest = service.create_rest_client()
        ...     [outcome.ok for outcome in rest.set_checkpoints_ttl([path], 86400).result()]
        [True]
        """
        return self._for_each("set_checkpoint_ttl", {"ttl_seconds": ttl_seconds}, paths, parallel, progress)

    def _for_each(
        self,
        name: str,
        request: object,
        paths: Paths,
        parallel: int,
        progress: Listener | None,
        *,
        gone_is_fine: bool = False,
    ) -> APIFuture[list[CheckpointOutcome]]:
        if parallel < 1:
            raise InvalidInputError(f"parallel: expected 1 or more, got {parallel}")
        if isinstance(paths, str):
            raise InvalidInputError("paths: expected a list, got one text")
        runtime = self._runtime

        def call(path: str) -> CheckpointOutcome:
            try:
                parsed = parse_path(runtime, path)
                place = {"run": parsed.training_run_id, "checkpoint": parsed.checkpoint_id}
                call_offered(runtime, name, request, path=place)
            except TinkerError as error:
                return CheckpointOutcome(path, None if gone_is_fine and gone_by_us(error) else error)
            return CheckpointOutcome(path)

        runtime.lifecycle.refuse_if_leaving()
        future: APIFuture[list[CheckpointOutcome]]
        future = runtime.lifecycle.make_future(call_site=find_call_site())
        wanted = [path if isinstance(path, str) else path.tinker_path for path in paths]
        Bulk(wanted, call, parallel, progress, future).start(runtime.pools.callback.run)
        runtime.lifecycle.note_change(future)
        return future

    # -------------------------------------------------------------------------------------- files

    def download_checkpoint(
        self,
        tinker_path: str,
        to: str | os.PathLike[str] | None = None,
        *,
        unpack: bool = True,
        overwrite: bool = False,
        parts: int = 4,
        progress: Callable[[TransferProgress], object] | None = None,
    ) -> APIFuture[CheckpointDownload]:
        """Download the files of a checkpoint. A broken connection does not end the download.

        An unfinished download is in a directory `<to>.partial`. The same call, also in a later process,
        continues from there. A directory of this name that no download created is an error. If the server has
        no archives, it exports a training checkpoint first, which takes time. `cancel()` of the future stops
        the download and keeps the bytes that have arrived.

        Args:
            tinker_path: the path of the checkpoint.
            to: the directory to create; None: one in the current directory, named after the path.
            unpack: if the server gives an archive, unpack it; False makes `to` the archive itself.
            overwrite: replace an existing `to`. Without it an existing `to` is an error.
            parts: the most parts of a file that are fetched at a time, 1 to 64.
            progress: called with `TransferProgress`, on a worker: for each new stage and file, and at most
                ten times a second for further bytes.

        The future fails with `TransferError`, with `UnsafeArchiveError` if an archive must not be unpacked,
        or with the error of a call that the service refused.

        Raises:
            InvalidInputError: the path, `to` or `parts` is not valid; nothing was sent.

        >>> import tempfile
        >>> from tinker_sync import ServiceClient
        >>> with tempfile.TemporaryDirectory() as place, ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_weights_for_sampler("final").result().path
        ...     got = service.create_rest_client().download_checkpoint(path, to=f"{place}/final").result()
        >>> sorted(file.name for file in got.files)
        ['adapter_config.json', 'adapter_model.safetensors']
        """
        parsed = parse_path(self._runtime, tinker_path)
        target = Path(parsed.directory_name if to is None else to)
        if target.name in ("", "..") or "\0" in str(target):
            raise InvalidInputError(f"to: expected the name of a directory to be made, got {str(to)!r}")
        if not 1 <= (as_whole(parts) or 0) <= MAX_PARTS:
            raise InvalidInputError(f"parts: expected 1 to {MAX_PARTS}, got {parts!r}")
        wish = _download.DownloadRequest(
            tinker_path=tinker_path,
            target=target.absolute(),
            unpacked=unpack,
            overwrite=overwrite,
            parts=parts,
        )
        runtime = self._runtime

        def download(control: Cancellation) -> CheckpointDownload:
            start = _progress.TransferProgress(tinker_path=tinker_path, stage="preparing")
            reporter = _progress.ProgressReporter(progress, runtime.pools.callback.run, runtime.clock, start)
            reporter.change()
            source = _sources.source_of(runtime, tinker_path)
            helpers = Workers("part", max(parts - 1, 1))
            try:
                return _download.CheckpointFetch(
                    wish,
                    source,
                    runtime.settings,
                    clock=runtime.clock,
                    cancellation=control,
                    reporter=reporter,
                    run=lambda job: helpers.run(carried(job)),
                ).run()
            finally:
                helpers.close(0)

        return self._alongside(download)

    def upload_external_weights(
        self,
        directory: str | os.PathLike[str],
        base_model: str,
        lora_config: LoraConfig,
        destination_project_id: str | None = None,
        *,
        progress: Callable[[TransferProgress], object] | None = None,
    ) -> APIFuture[str]:
        """Upload an adapter. The future has the path of the new checkpoint. Experimental.

        Args:
            directory: the files, in the form in which `TrainingClient.save_weights_external` exports them.
            base_model: the base model of the adapter.
            lora_config: the shape of the adapter.
            destination_project_id: the project; None: that of this client, else the default project.
            progress: called with `TransferProgress`, on a worker: for each new stage and file, and at most
                ten times a second for further bytes.

        The future fails with `UnsupportedByServerError` if the server takes no uploads, with
        `InvalidInputError` if a file is missing, or with `TransferError`.

        Raises:
            InvalidInputError: `directory` is not a directory.

        >>> import tempfile, warnings
        >>> from tinker_sync import ExperimentalWarning, LoraConfig, ServiceClient
        >>> warnings.simplefilter("ignore", ExperimentalWarning)
        >>> with tempfile.TemporaryDirectory() as place, ServiceClient(base_url="local") as service:
        ...     rest = service.create_rest_client()
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_weights_external("mine").result().path
        ...     files = rest.download_checkpoint(path, to=f"{place}/mine").result().path
        ...     shape = LoraConfig(rank=4)
        ...     path = rest.upload_external_weights(files, "tinker-sync/tiny", shape).result()
        ...     path.startswith("tinker://")
        True
        """
        warn_experimental("upload_external_weights")
        place = Path(directory)
        if not place.is_dir():
            raise InvalidInputError(f"directory: there is none at {str(directory)!r}")
        runtime = self._runtime
        request = types.ExternalWeightsUploadStartRequest(
            base_model=base_model,
            lora_config=lora_config,
            destination_project_id=destination_project_id or runtime.settings.project_id,
        )

        def begin() -> tuple[str, dict[str, str]]:
            begun: ExternalWeightsUploadStartResult = call_offered(
                runtime, "external_weights_upload_start", request
            )
            return begun.upload_id, begun.urls

        def upload(control: Cancellation) -> str:
            start = _progress.TransferProgress(tinker_path="", stage="preparing")
            reporter = _progress.ProgressReporter(progress, runtime.pools.callback.run, runtime.clock, start)
            http = _signed.SignedHttp(runtime.settings)
            try:
                sender = _upload.DirectoryUpload(
                    place, http, clock=runtime.clock, cancellation=control, reporter=reporter
                )
                upload_id = sender.run(begin)
            finally:
                http.close()
            finished: ExternalWeightsUploadFinishResult = call_offered(
                runtime,
                "external_weights_upload_finish",
                types.ExternalWeightsUploadFinishRequest(upload_id=upload_id),
            )
            reporter.change(stage="done", file=None, tinker_path=finished.tinker_path)
            return finished.tinker_path

        future = self._alongside(upload)
        runtime.lifecycle.note_change(future)
        return future

    def _alongside(self, work: Callable[[Cancellation], T]) -> APIFuture[T]:
        """Run `work` on a new thread, and return its future. A cancel or a closed client stops `work`."""
        runtime = self._runtime
        runtime.lifecycle.refuse_if_leaving()
        future: APIFuture[T] = runtime.lifecycle.make_future(call_site=find_call_site())
        control = _signed.Cancellation()
        future._when_done(lambda _: control.stop())
        worker = Workers("transfer", 1)

        def run() -> None:
            try:
                future._mark_sending()
                future.resolve(work(control))
            except Exception as error:  # noqa: BLE001  # the future raises it
                future.fail(error)
            finally:
                worker.close(0)

        try:
            worker.run_call(carried(run))
        except TinkerError as error:
            future.fail(error)
        return future

    # -------------------------------------------------------------------------------------- sessions

    def get_session(
        self, session_id: str, access_scope: AccessScope = "owned"
    ) -> APIFuture[GetSessionResponse]:
        """Return a session with its runs and samplers.

        Args:
            session_id: the id of the session.
            access_scope: "accessible" also finds shared sessions of other users.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     session_id = training.model_id.partition(":")[0]
        ...     session = service.create_rest_client().get_session(session_id).result()
        ...     session.training_run_ids == [training.model_id]
        True
        """
        return self._call(
            "get_session",
            path={"session": checked_id("session_id", session_id)},
            query={"access_scope": checked_scope(access_scope)},
        )

    def list_sessions(
        self, limit: int = 20, offset: int = 0, access_scope: AccessScope = "owned"
    ) -> APIFuture[ListSessionsResponse]:
        """Return a page of session ids.

        Args:
            limit: the largest number of entries.
            offset: the number of entries before the page.
            access_scope: "accessible" also lists shared sessions of other users.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     session_id = training.model_id.partition(":")[0]
        ...     session_id in service.create_rest_client().list_sessions(limit=5).result().sessions
        True
        """
        return self._call(
            "list_sessions",
            query={"limit": limit, "offset": offset, "access_scope": checked_scope(access_scope)},
        )

    def iter_sessions(self, *, limit: int | None = None, access_scope: AccessScope = "owned") -> Listing[str]:
        """Iterate over the ids of all sessions. The next page is fetched while you use the present one.

        No id comes twice, also if sessions appear or vanish meanwhile. The service does not give the number
        of sessions, so `total` of the iterator stays None.

        Args:
            limit: the largest number of entries; None: all.
            access_scope: "accessible" also lists shared sessions of other users.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     session_id = training.model_id.partition(":")[0]
        ...     session_id in list(service.create_rest_client().iter_sessions())
        True
        """
        checked_scope(access_scope)
        return Listing(
            lambda size, offset: self.list_sessions(size, offset, access_scope),
            lambda answer: Page(answer.sessions),
            str,
            limit=limit,
        )

    def search_sessions(self, request: SessionSearchRequest) -> APIFuture[SessionSearchResponse]:
        """Return a page of the sessions that match a request. Experimental: the service may change this call.

        >>> import tinker_sync, warnings
        >>> warnings.simplefilter("ignore", tinker_sync.ExperimentalWarning)
        >>> with tinker_sync.ServiceClient(base_url="local", display_name="a search") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4).result()
        ...     request = tinker_sync.types.SessionSearchRequest(display_name="a search")
        ...     found = service.create_rest_client().search_sessions(request).result()
        >>> {session.display_name for session in found.sessions}
        {'a search'}
        """
        warn_experimental("search_sessions")
        return self._call("search_sessions", request)

    def assign_session_project(self, session_id: str, project_id: str) -> APIFuture[None]:
        """Move a session to a project.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     session_id = training.model_id.partition(":")[0]
        ...     service.create_rest_client().assign_session_project(session_id, "project-2").result()
        """
        return self._call(
            "assign_session_project",
            {"project_id": project_id},
            path={"session": checked_id("session_id", session_id)},
        )

    def export_session_trace(self, session_id: str) -> APIFuture[str]:
        """Let the server write the timeline of a session as a Perfetto trace. Return the trace's address.

        This takes minutes; after an hour the client gives up. If the server could not write the trace, the
        future fails with a TinkerError that is also a RuntimeError.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     session_id = training.model_id.partition(":")[0]
        ...     url = service.create_rest_client().export_session_trace(session_id).result()
        >>> url.startswith("http")
        True
        """
        call = make_call(
            "export_session_trace",
            self._runtime.settings,
            path={"session": checked_id("session_id", session_id)},
            deadline_s=REST_S,
        )
        runtime = self._runtime

        def export() -> str:
            give_up_at = runtime.clock.now() + _TRACE_LIMIT_S
            said = False
            while runtime.clock.now() < give_up_at:
                reply = runtime.connection.caller.call(call)
                url = _trace_url(reply, runtime.connection.secrets)
                if url is not None:
                    return url
                if not said:
                    _log.warning("the trace of session %s is being written; this takes minutes", session_id)
                    said = True
                runtime.clock.wait(threading.Event(), _TRACE_POLL_S)
            raise TinkerError(f"the trace of session {session_id} was not written within an hour")

        return self._later(export)

    # -------------------------------------------------------------------------------------- the account

    # The calls about billing and audit have moved to `AdminClient`; here they work with a warning.

    def get_server_capabilities(self) -> APIFuture[GetServerCapabilitiesResponse]:
        """Return the models that the server offers.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     service.create_rest_client().get_server_capabilities().result().supported_models[0].model_name
        'tinker-sync/tiny'
        """
        return self._call("get_server_capabilities")

    def whoami(self) -> APIFuture[WhoamiResponse]:
        """Return the owner of the key, from the token that the key is exchanged for.

        The future fails with UnsupportedByServerError, which is a RuntimeError here, if there is no token.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     try:
        ...         service.create_rest_client().whoami().result()
        ...     except tinker_sync.UnsupportedByServerError:
        ...         print("this server does not tell")
        this server does not tell
        """
        return self._later(self._identity)

    def _identity(self) -> WhoamiResponse:
        runtime = self._runtime
        runtime.server.start()  # the settings name servers that exchange keys for tokens
        claims = runtime.connection.keys.identity()
        if claims is None:
            raise UnknownOwnerError(
                "whoami: this server exchanges no tokens, so nothing tells whose key this is; whether it is "
                "taken, `tinker-sync auth status` tells",
                feature="whoami",
            )
        return types.WhoamiResponse(
            user_urn=str(claims.get("sub", "")),
            org_urn=f"tml:organization:{claims.get('org_id', '')}",
            email=claims.get("email") or None,
        )

    def get_billing_usage(
        self, starting_on: datetime | str, ending_before: datetime | str
    ) -> APIFuture[BillingUsageResponse]:
        """Call `AdminClient.get_billing_usage`, the new name of this method.

        >>> import tinker_sync, warnings
        >>> from datetime import datetime, timedelta, timezone
        >>> warnings.simplefilter("ignore", FutureWarning)  # it has moved
        >>> today = datetime.now(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     rest = service.create_rest_client()
        ...     used = rest.get_billing_usage(today, today + timedelta(days=1)).result()
        >>> len(used.data) >= 0
        True
        """
        return self._moved("get_billing_usage").get_billing_usage(starting_on, ending_before)

    def get_current_checkpoint_storage_usage(
        self, project_id: str | None = None
    ) -> APIFuture[CurrentCheckpointStorageUsageResponse]:
        """Call `AdminClient.get_current_checkpoint_storage_usage`, the new name of this method.

        >>> import tinker_sync, warnings
        >>> warnings.simplefilter("ignore", FutureWarning)  # it has moved
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     rest = service.create_rest_client()
        ...     stored = rest.get_current_checkpoint_storage_usage("project-3").result()
        >>> stored.data
        []
        """
        moved = self._moved("get_current_checkpoint_storage_usage")
        return moved.get_current_checkpoint_storage_usage(project_id)

    def get_audit_log(
        self, event_type: AuditEvents = "all", day: date | None = None
    ) -> APIFuture[AuditLogResponse]:
        """Call `AdminClient.get_audit_log`, the new name of this method.

        >>> import tinker_sync, warnings
        >>> warnings.simplefilter("ignore", FutureWarning)  # it has moved
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     log = service.create_rest_client().get_audit_log("teams").result()
        >>> log.entries
        []
        """
        return self._moved("get_audit_log").get_audit_log(event_type, day)

    def _moved(self, name: str) -> AdminClient:
        warn_caller(f"{name} has moved to AdminClient", FutureWarning)
        return AdminClient(self._runtime)

    get_training_run_async = async_result(get_training_run)
    get_training_run_by_tinker_path_async = async_result(get_training_run_by_tinker_path)
    list_training_runs_async = async_result(list_training_runs)
    get_sampler_async = async_result(get_sampler)
    list_checkpoints_async = async_result(list_checkpoints)
    list_user_checkpoints_async = async_result(list_user_checkpoints)
    delete_checkpoint_async = async_result(delete_checkpoint)
    delete_checkpoint_from_tinker_path_async = async_result(delete_checkpoint_from_tinker_path)
    publish_checkpoint_from_tinker_path_async = async_result(publish_checkpoint_from_tinker_path)
    unpublish_checkpoint_from_tinker_path_async = async_result(unpublish_checkpoint_from_tinker_path)
    set_checkpoint_ttl_from_tinker_path_async = async_result(set_checkpoint_ttl_from_tinker_path)
    get_external_weights_urls_async = async_result(get_external_weights_urls)
    copy_weights_async = async_result(copy_weights)
    search_checkpoints_async = async_result(search_checkpoints)
    external_weights_upload_start_async = async_result(external_weights_upload_start)
    external_weights_upload_finish_async = async_result(external_weights_upload_finish)
    get_checkpoint_archive_url_async = async_result(get_checkpoint_archive_url)
    get_checkpoint_archive_url_from_tinker_path_async = async_result(
        get_checkpoint_archive_url_from_tinker_path
    )
    get_session_async = async_result(get_session)
    list_sessions_async = async_result(list_sessions)
    search_sessions_async = async_result(search_sessions)
    assign_session_project_async = async_result(assign_session_project)
    export_session_trace_async = async_result(export_session_trace)
    get_server_capabilities_async = async_result(get_server_capabilities)
    get_billing_usage_async: Any = async_result(get_billing_usage)
    get_current_checkpoint_storage_usage_async: Any = async_result(get_current_checkpoint_storage_usage)
    get_audit_log_async: Any = async_result(get_audit_log)


def _checked_place(training_run_id: str, checkpoint_id: str) -> dict[str, str]:
    return {
        "run": checked_id("training_run_id", training_run_id),
        "checkpoint": checked_id("checkpoint_id", checkpoint_id),
    }


def _trace_url(reply: Reply, secrets: Callable[[], Iterable[Secret]]) -> str | None:
    """Return the address of a trace, or None while the server writes it."""
    row = ENDPOINTS["export_session_trace"]
    try:
        tree = wire_json.loads(reply.body)
    except WireError as error:
        raise odd_answer(row, reply, error, secrets) from error
    state = tree.get("status") if isinstance(tree, dict) else None
    if state == "ready" and isinstance(tree.get("url"), str):
        url: str = tree["url"]
        return url
    if state == "pending":
        return None
    if state == "failed":
        why = mask_text(str(tree.get("error") or "no reason given"), secrets())
        raise TraceFailedError(f"the server could not write the trace: {why}")
    odd = WireError(f"unknown state of a trace: {short_repr(state)}", path="$.status")
    raise odd_answer(row, reply, odd, secrets) from odd
