"""The sources of a checkpoint's files, which depend on the kind of the checkpoint and on the server."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any, Final

from tinker_sync._base.clock import http_date
from tinker_sync._base.log import Log
from tinker_sync.clients._base import REST_S, SAVE_S
from tinker_sync.clients._models import LoadedModel
from tinker_sync.clients.rest._base import missing_route, parse_path
from tinker_sync.clients.training import TrainingClient
from tinker_sync.errors import (
    APIResponseValidationError,
    APIStatusError,
    TinkerError,
    UnsupportedByServerError,
)
from tinker_sync.runtime.calls import make_call
from tinker_sync.runtime.client import ClientRuntime
from tinker_sync.runtime.session import Session
from tinker_sync.transport.call import Reply
from tinker_sync.transport.files.download import ARCHIVE, DownloadSource
from tinker_sync.transport.files.signed import SignedUrls, follow, in_utc
from tinker_sync.types import ExternalWeightsUrlsResponse, LoadWeightsRequest, ParsedCheckpointTinkerPath

# The validity of an archive's address if the server does not state it.
_ARCHIVE_URL_LIFE: Final = timedelta(minutes=15)
# An export exists for one download. Each new address prolongs its life.
_EXPORT_TTL_S: Final = 3600
_ABSENT: Final = frozenset({404, 405, 410, 501})

_log = Log(__name__)


def source_of(runtime: ClientRuntime, tinker_path: str) -> DownloadSource:
    """Return the source of a checkpoint's files. Asks the server for its settings if they are not known yet.

    An exported checkpoint has files. A training checkpoint comes in an archive, if the server has archives;
    otherwise the server exports it for the download. A checkpoint for sampling comes in an archive.
    """
    parsed = parse_path(runtime, tinker_path)
    if parsed.checkpoint_type == "external":
        return ExternalFiles(runtime, parsed)
    archives = runtime.server.start().facts.dialect.offers("get_checkpoint_archive")
    if parsed.checkpoint_type == "training" and not archives:
        return ExportedFiles(runtime, parsed)
    return Archive(runtime, parsed, offered=archives)


class ExternalFiles(DownloadSource):
    """The source of an exported checkpoint, which has files on the server."""

    def __init__(self, runtime: ClientRuntime, parsed: ParsedCheckpointTinkerPath) -> None:
        self._runtime = runtime
        self._parsed = parsed

    def sign(self) -> SignedUrls:
        """Return the signed addresses of the checkpoint's files."""
        found: ExternalWeightsUrlsResponse = self._runtime.server.call(
            "get_external_weights_urls",
            path={"run": self._parsed.training_run_id, "name": self._parsed.checkpoint_id.partition("/")[2]},
            usual_s=REST_S,
        )
        return SignedUrls(found.urls, in_utc(found.expires))


class ExportedFiles(DownloadSource):
    """The source of a training checkpoint: an export that is made for one download and deleted after it."""

    def __init__(self, runtime: ClientRuntime, parsed: ParsedCheckpointTinkerPath) -> None:
        self._runtime = runtime
        self._parsed = parsed
        self._export: ParsedCheckpointTinkerPath
        self._files: ExternalFiles

    def begin(self, memory: dict[str, Any]) -> None:
        """Use the export of an earlier attempt if it still exists; else make one.

        `memory` keeps the path of the export, under "export", for later attempts.
        """
        kept = memory.get("export")
        if isinstance(kept, str):
            self._take(kept)
            try:
                self.sign()
            except APIStatusError as error:
                if error.status_code not in _ABSENT:
                    raise
            else:
                return
        memory["export"] = self._make()
        self._take(memory["export"])

    def sign(self) -> SignedUrls:
        """Try to extend the lifetime of the export, and return the signed addresses of its files."""
        self._try("set_checkpoint_ttl", {"ttl_seconds": _EXPORT_TTL_S})
        return self._files.sign()

    def finish(self) -> None:
        """Delete the export. If that fails, the server deletes it when it expires."""
        self._try("delete_checkpoint", None)

    def _take(self, path: str) -> None:
        self._export = ParsedCheckpointTinkerPath.from_tinker_path(path)
        self._files = ExternalFiles(self._runtime, self._export)

    def _make(self) -> str:
        """Load the checkpoint into a model of a new session, export it, and return the path of the export."""
        runtime = self._runtime
        session = Session(
            user_metadata={"created_by": "tinker_sync checkpoint download"},
            project_id=runtime.settings.project_id,
        )
        own = ClientRuntime(runtime.settings, session=session, clock=runtime.clock)
        status: Any = "errored"
        try:
            load = LoadWeightsRequest(path=self._parsed.tinker_path, optimizer=False)
            until = runtime.clock.now() + SAVE_S
            trainer = TrainingClient._make(own, LoadedModel.of(own, load, until))
            saved = trainer.result().save_weights_external("download", _EXPORT_TTL_S).result()
            status = "success"
            return saved.path
        finally:
            own.close(status).result()

    def _try(self, name: str, request: Any) -> None:
        path = {"run": self._export.training_run_id, "checkpoint": self._export.checkpoint_id}
        try:
            self._runtime.server.call(name, request, path=path, usual_s=REST_S)
        except TinkerError as error:
            _log.warning("%s of the export %s: %s", name, self._export.tinker_path, error)


class Archive(DownloadSource):
    """The source of a checkpoint that comes as one archive with all files, which older servers offer."""

    archive = True

    def __init__(self, runtime: ClientRuntime, parsed: ParsedCheckpointTinkerPath, *, offered: bool) -> None:
        self._runtime = runtime
        self._parsed = parsed
        self._offered = offered

    def sign(self) -> SignedUrls:
        """Return the address of the archive."""
        runtime, parsed = self._runtime, self._parsed
        try:
            url, expires = find_archive(runtime, parsed.training_run_id, parsed.checkpoint_id)
        except (APIStatusError, UnsupportedByServerError) as error:
            answer = error.__cause__ if isinstance(error, UnsupportedByServerError) else error
            assert isinstance(answer, APIStatusError)  # noqa: S101  # `find_archive` sets the cause
            raise self._explained(error, answer) from answer
        return SignedUrls({ARCHIVE: follow(f"{runtime.settings.base_url}/", url)}, expires)

    def _explained(self, error: TinkerError, answer: APIStatusError) -> TinkerError:
        if answer.status_code in (405, 501) and self._parsed.checkpoint_type == "training":
            return UnsupportedByServerError(
                f"the server has no archive of {self._parsed.tinker_path}: it gives archives of weights for "
                "sampling only. Save the weights with TrainingClient.save_weights_for_sampler",
                feature="get_checkpoint_archive",
            )
        if error is not answer or self._offered or answer.status_code not in _ABSENT:
            return error
        return UnsupportedByServerError(
            f"the server has no archive of {self._parsed.tinker_path}: there is no such checkpoint, or it "
            "cannot be downloaded as it is. Checkpoints of TrainingClient.save_weights_external can",
            feature="get_checkpoint_archive",
        )


def find_archive(runtime: ClientRuntime, run: str, checkpoint: str) -> tuple[str, datetime]:
    """Return the address of a checkpoint's archive and its expiry.

    If the server does not know a sampler checkpoint as `sampler_weights/NAME`, ask for `NAME`, for which some
    open servers give the archive of the sampler checkpoint.

    Raises:
        UnsupportedByServerError: the server has no archives.
        TinkerError: the call failed.
    """
    folder, _, bare = checkpoint.rpartition("/")
    runtime.server.start()
    failures: list[APIStatusError] = []
    for name in (checkpoint, bare) if folder == "sampler_weights" else (checkpoint,):
        call = make_call(
            "get_checkpoint_archive",
            runtime.settings,
            path={"run": run, "checkpoint": name},
            headers={"Accept": "application/gzip"},
            deadline_s=REST_S,
        )
        try:
            return archive_address(runtime.connection.caller.call(call), runtime.clock.time())
        except APIStatusError as error:
            if error.status_code not in {*_ABSENT, 400, 422}:
                raise
            failures.append(error)
    *others, last = failures
    missing = missing_route(runtime, "get_checkpoint_archive", last)
    if missing is None:
        raise last
    for failure in others:
        if missing_route(runtime, "get_checkpoint_archive", failure) is None:
            raise failure
    raise missing from last


def archive_address(reply: Reply, now_s: float) -> tuple[str, datetime]:
    """Return the address of an archive and its expiry, from the redirect to the archive.

    If the redirect does not state the expiry, assume 15 minutes from `now_s`.

    Raises:
        APIResponseValidationError: the answer is no redirect.
    """
    url = reply.headers.get("location")
    if reply.status not in (301, 302, 303, 307, 308) or not url:
        raise APIResponseValidationError(
            "the answer does not redirect to an archive", status_code=reply.status, method="GET"
        )
    expires = http_date(reply.headers.get("expires"))
    return url, expires or datetime.fromtimestamp(now_s, tz=timezone.utc) + _ARCHIVE_URL_LIFE
