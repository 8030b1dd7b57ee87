"""Calls that move files: download of a checkpoint, and upload of an adapter."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tinker_sync import types
from tinker_sync._base.lazy import LazyModule
from tinker_sync.clients.rest._base import RestBase, call_offered, parse_path, warn_experimental
from tinker_sync.errors import InvalidInputError, TinkerError
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.naming import carried, find_call_site
from tinker_sync.runtime.workers import Workers
from tinker_sync.types._checks import as_whole

if TYPE_CHECKING:
    from tinker_sync.clients.rest import _sources
    from tinker_sync.transfer import download as _download
    from tinker_sync.transfer import progress as _progress
    from tinker_sync.transfer import signed as _signed
    from tinker_sync.transfer import upload as _upload
    from tinker_sync.transfer.download import CheckpointDownload
    from tinker_sync.transfer.progress import TransferProgress
    from tinker_sync.transfer.signed import Cancellation
    from tinker_sync.types import (
        ExternalWeightsUploadFinishResult,
        ExternalWeightsUploadStartResult,
        LoraConfig,
    )
else:  # most clients move no files
    _sources = LazyModule("tinker_sync.clients.rest._sources")
    _download = LazyModule("tinker_sync.transfer.download")
    _progress = LazyModule("tinker_sync.transfer.progress")
    _signed = LazyModule("tinker_sync.transfer.signed")
    _upload = LazyModule("tinker_sync.transfer.upload")

T = TypeVar("T")

MAX_PARTS = 64


class TransferCalls(RestBase):
    """The part of a REST client with calls that move files."""

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
        parse_path(self._runtime, tinker_path)
        target = _download.default_target(tinker_path) if to is None else Path(to)
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
            return _download.CheckpointFetch(
                wish, source, runtime.settings, clock=runtime.clock, cancellation=control, reporter=reporter
            ).run()

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
        future: APIFuture[T] = runtime.lifecycle.make_future()
        future._call_site = find_call_site()
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
