"""The calls of a training client that save and load weights."""

from __future__ import annotations

from typing import NoReturn

from tinker_sync._base.left_out import refuse_arguments
from tinker_sync.clients import _deadlines
from tinker_sync.clients._arguments import check_saving, check_state_path
from tinker_sync.clients._async import async_future
from tinker_sync.clients._passes import Client, PassCalls
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.naming import warn_caller
from tinker_sync.types import (
    LoadWeightsRequest,
    LoadWeightsResponse,
    SaveWeightsExternalRequest,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsRequest,
    SaveWeightsResponse,
)


class WeightCalls(PassCalls[Client]):
    """The part of a training client that saves and loads weights."""

    def save_state(
        self,
        /,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
        *,
        deadline: float | None = None,
        **removed: NoReturn,
    ) -> APIFuture[SaveWeightsResponse]:
        """Save weights and optimizer state under a name, to continue the training later.

        `tinker_sync.loop.verify_checkpoint` checks that the server restores the checkpoint as it was saved.

        Args:
            name: the name of the checkpoint.
            ttl_seconds: its lifetime in seconds; None: the server's default.
            overwrite: replace a checkpoint of the same name, including its metadata.
            user_metadata: your own notes about it.
            deadline: the seconds after which the call is given up.

        Raises:
            InvalidInputError: the name cannot be part of a path, or another argument has a wrong value.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     saved = training.save_state("step-100", user_metadata={"step": "100"}).result()
        ...     saved.path.rpartition(":")[2]
        '0/weights/step-100'
        """
        refuse_arguments("save_state", removed, unknown=True)
        check_saving(name, ttl_seconds, "save_state")
        request = SaveWeightsRequest(
            model_id=self._line.model_id,
            path=name,
            ttl_seconds=ttl_seconds,
            overwrite=overwrite,
            user_metadata=user_metadata,
        )
        return self._ordered("save_weights", request, SaveWeightsResponse, deadline, _deadlines.SAVE_S)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
        user_metadata: dict[str, str] | None = None,
        *,
        deadline: float | None = None,
    ) -> APIFuture[SaveWeightsForSamplerResponse]:
        """Save weights under a name, to sample from them. Arguments and errors as in `save_state`.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_weights_for_sampler("step-100").result().path
        ...     service.create_sampling_client(path).get_base_model()
        'tinker-sync/tiny'
        """
        check_saving(name, ttl_seconds, "save_weights_for_sampler")
        request = SaveWeightsForSamplerRequest(
            model_id=self._line.model_id, path=name, ttl_seconds=ttl_seconds, user_metadata=user_metadata
        )
        return self._ordered(
            "save_weights_for_sampler", request, SaveWeightsForSamplerResponse, deadline, _deadlines.SAVE_S
        )

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
        *,
        deadline: float | None = None,
    ) -> APIFuture[SaveWeightsExternalResponse]:
        """Export the weights for download.

        Args:
            name: the name of the export.
            ttl_seconds: its lifetime in seconds.
            age_encryption_recipients: public keys for which the export is encrypted.
            deadline: the seconds after which the call is given up.

        Raises:
            InvalidInputError: the name cannot be part of a path, or the lifetime is not positive.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_weights_external("mine").result().path
        ...     sorted(service.create_rest_client().get_external_weights_urls(path).result().urls)
        ['adapter_config.json', 'adapter_model.safetensors']
        """
        check_saving(name, ttl_seconds, "save_weights_external")
        request = SaveWeightsExternalRequest(
            model_id=self._line.model_id,
            path=name,
            ttl_seconds=ttl_seconds,
            age_encryption_recipients=age_encryption_recipients,
        )
        return self._ordered(
            "save_weights_external", request, SaveWeightsExternalResponse, deadline, _deadlines.SAVE_S
        )

    def load_state(
        self, path: str, weights_access_token: str | None = None, *, deadline: float | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Load the weights of a checkpoint into this model, without the state of the optimizer. Deprecated.

        Newer servers load weights into new models only; see `create_training_client_from_state`. This method
        issues a FutureWarning.

        Raises:
            InvalidInputError: the path cannot be that of a checkpoint for training.

        >>> import tinker_sync, warnings
        >>> warnings.simplefilter("ignore", FutureWarning)  # newer servers load weights into new models only
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("start").result().path
        ...     training.load_state(path).result().path == path
        True
        """
        weights_access_token = self._runtime.connection.mask(weights_access_token)
        return self._load("load_state", path, weights_access_token, deadline)

    def load_state_with_optimizer(
        self, path: str, weights_access_token: str | None = None, *, deadline: float | None = None
    ) -> APIFuture[LoadWeightsResponse]:
        """Load the weights and the optimizer state of a checkpoint into this model; see `load_state`.

        >>> import tinker_sync, warnings
        >>> warnings.simplefilter("ignore", FutureWarning)  # newer servers load weights into new models only
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("start").result().path
        ...     training.load_state_with_optimizer(path).result().path == path
        True
        """
        weights_access_token = self._runtime.connection.mask(weights_access_token)
        return self._load("load_state_with_optimizer", path, weights_access_token, deadline)

    def _load(
        self, name: str, path: str, token: str | None, deadline: float | None
    ) -> APIFuture[LoadWeightsResponse]:
        suffix = name.removeprefix("load_state")
        warn_caller(
            f"{name} is on its way out: servers load weights only into a new model. "
            f"Use ServiceClient.create_training_client_from_state{suffix}.",
            FutureWarning,
        )
        check_state_path(path, name)
        request = LoadWeightsRequest(
            model_id=self._line.model_id, path=path, optimizer=bool(suffix), weights_access_token=token
        )
        return self._ordered("load_weights", request, LoadWeightsResponse, deadline, _deadlines.SAVE_S)

    save_state_async = async_future(save_state)
    save_weights_for_sampler_async = async_future(save_weights_for_sampler)
    save_weights_external_async = async_future(save_weights_external)
    load_state_async = async_future(load_state)
    load_state_with_optimizer_async = async_future(load_state_with_optimizer)
