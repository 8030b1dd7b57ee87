"""Calls about training runs, about the weights of checkpoints, and about samplers."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from tinker_sync.clients._async import async_result
from tinker_sync.clients.rest._base import AccessScope, RestBase, checked_id, checked_scope, parse_path
from tinker_sync.clients.rest.listing import Listing, Page
from tinker_sync.runtime.futures import APIFuture

if TYPE_CHECKING:
    from tinker_sync.types import GetSamplerResponse, TrainingRun, TrainingRunsResponse, WeightsInfoResponse


class RunCalls(RestBase):
    """The part of a REST client with calls about training runs, weights and samplers."""

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

    get_training_run_async = async_result(get_training_run)
    get_training_run_by_tinker_path_async = async_result(get_training_run_by_tinker_path)
    list_training_runs_async = async_result(list_training_runs)
    get_sampler_async = async_result(get_sampler)
