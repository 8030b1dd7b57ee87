"""Calls about checkpoints: list, publish, keep for a time, copy, delete, and find the files."""

from __future__ import annotations

import uuid
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from attrs import frozen

from tinker_sync import types
from tinker_sync.clients._async import async_result
from tinker_sync.clients._base import REST_S
from tinker_sync.clients.rest._base import RestBase, checked_id, parse_path, warn_experimental
from tinker_sync.clients.rest.listing import Listing, Page
from tinker_sync.errors import InvalidInputError
from tinker_sync.runtime.futures import APIFuture

if TYPE_CHECKING:
    from tinker_sync.types import (
        Checkpoint,
        CheckpointSearchRequest,
        CheckpointSearchResponse,
        CheckpointsListResponse,
        CopyWeightsResponse,
        ExternalWeightsUploadFinishResult,
        ExternalWeightsUploadStartResult,
        ExternalWeightsUrlsResponse,
        LoraConfig,
    )


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


class CheckpointCalls(RestBase):
    """The part of a REST client with calls about checkpoints."""

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

    # ---------------------------------------------------------------------------------- newer servers

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

    # ---------------------------------------------------------------------------------- older servers

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

    # ---------------------------------------------------------------------------------- one line of work

    def _on_path(self, name: str, tinker_path: str, request: Any = None) -> APIFuture[None]:
        parsed = parse_path(self._runtime, tinker_path)
        path = {"run": parsed.training_run_id, "checkpoint": parsed.checkpoint_id}
        return self._call(name, request, path=path)

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


def _checked_place(training_run_id: str, checkpoint_id: str) -> dict[str, str]:
    return {
        "run": checked_id("training_run_id", training_run_id),
        "checkpoint": checked_id("checkpoint_id", checkpoint_id),
    }
