"""The methods of a service client that create training, sampling and REST clients, losses and copies.

The methods import the training and REST clients on first use, so a program that only samples does not load
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

from tinker_sync import types
from tinker_sync._base.left_out import refuse_arguments
from tinker_sync.clients import _deadlines
from tinker_sync.clients._arguments import check_is_path
from tinker_sync.clients._async import async_result
from tinker_sync.clients._shared import BaseClient
from tinker_sync.clients.sampling import SamplingClient

if TYPE_CHECKING:
    from tinker_sync.clients.rest import RestClient
    from tinker_sync.clients.retry_config import RetryConfig
    from tinker_sync.clients.training import TrainingClient
    from tinker_sync.losses.handle import LossHandle, PerDatumLossFn
    from tinker_sync.runtime.futures import APIFuture
    from tinker_sync.types import CustomLossInputRank, LoadWeightsRequest, OptimizerConfig


class ClientFactory(BaseClient):
    """The part of a service client that creates other clients, losses and copies of weights."""

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int | None = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: dict[str, str] | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        deadline: float | None = None,
    ) -> TrainingClient:
        """Create a new LoRA model, and return at once the client that trains it.

        `result()` and `await` wait until the model exists, and raise the error if its creation fails.

        Args:
            base_model: the model to fine-tune; see `get_server_capabilities`.
            rank: the rank of the LoRA matrices. With 0, a server that can do it trains all weights of the
                model; with None, the request says nothing of LoRA, which other such servers want.
            seed: the seed for the first values of these matrices; None: the server draws one.
            train_mlp: train the MLP layers.
            train_attn: train the attention layers.
            train_unembed: train the unembedding.
            user_metadata: your own notes about this run.
            optimizer: the kind of optimizer; None: AdamW.
            deadline: the seconds after which the call is given up.

        Raises:
            AssertionError: `train_mlp`, `train_attn` and `train_unembed` are all False.
            InvalidInputError: `base_model` is not the name of a model, or another argument has a wrong type
                or value.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny")
        ...     training.result() is training
        True
        """
        assert train_mlp or train_attn or train_unembed, (  # noqa: S101  # scripts catch AssertionError
            "create_lora_training_client: at least one of train_mlp, train_attn, train_unembed must be true"
        )
        from tinker_sync.clients._models import NewModel
        from tinker_sync.clients.training import TrainingClient

        flags = {"train_unembed": train_unembed, "train_mlp": train_mlp, "train_attn": train_attn}
        lora = None if rank is None else types.LoraConfig(rank=rank, seed=seed, **flags)
        model = NewModel.of(self._runtime, base_model, lora, user_metadata, optimizer, self._until(deadline))
        return TrainingClient._make(self._runtime, model)

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        optimizer: OptimizerConfig | None = None,
        *,
        deadline: float | None = None,
    ) -> TrainingClient:
        """Create a new model with the weights of a checkpoint and a fresh optimizer.

        Returns at once the client that trains the new model.

        Args:
            path: the path of the checkpoint, ``tinker://…/weights/…``.
            base_model: replaces the base model of the checkpoint; it must fit the weights.
            user_metadata: your own notes about this run.
            weights_access_token: a key of another account that may read the checkpoint.
            optimizer: the kind of optimizer; None: AdamW.
            deadline: the seconds after which the call is given up.

        Raises:
            InvalidInputError: the path cannot be that of a checkpoint for training, or another argument has
                a wrong type or value.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("step-100").result().path
        ...     again = service.create_training_client_from_state(path, user_metadata={"from": "step-100"})
        ...     again.get_info().lora_rank
        4
        """
        check_is_path(path, "create_training_client_from_state")
        weights_access_token = self._runtime.connection.mask(weights_access_token)
        load = types.LoadWeightsRequest(
            path=path,
            optimizer=False,
            base_model=base_model,
            user_metadata=user_metadata,
            weights_access_token=weights_access_token,
            optimizer_config=optimizer,
        )
        return self._load(load, deadline)

    def create_training_client_from_state_with_optimizer(
        self,
        /,
        path: str,
        base_model: str | None = None,
        user_metadata: dict[str, str] | None = None,
        weights_access_token: str | None = None,
        *,
        deadline: float | None = None,
        **removed: NoReturn,
    ) -> TrainingClient:
        """Create a new model with the weights and the optimizer state of a checkpoint.

        Returns at once the client that trains the new model. Arguments and errors as in
        `create_training_client_from_state`.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("step-100").result().path
        ...     resumed = service.create_training_client_from_state_with_optimizer(path)
        ...     resumed.get_info().lora_rank
        4
        """
        refuse_arguments("create_training_client_from_state_with_optimizer", removed, unknown=True)
        check_is_path(path, "create_training_client_from_state_with_optimizer")
        weights_access_token = self._runtime.connection.mask(weights_access_token)
        load = types.LoadWeightsRequest(
            path=path,
            optimizer=True,
            base_model=base_model,
            user_metadata=user_metadata,
            weights_access_token=weights_access_token,
        )
        return self._load(load, deadline)

    def _load(self, load: LoadWeightsRequest, deadline: float | None) -> TrainingClient:
        from tinker_sync.clients._models import LoadedModel
        from tinker_sync.clients.training import TrainingClient

        asked = LoadedModel.of(self._runtime, load, self._until(deadline))
        return TrainingClient._make(self._runtime, asked)

    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        """Return at once a client that samples from saved weights or from a base model.

        `result()` and `await` wait until the sampler exists at the server.

        Args:
            model_path: the weights, ``tinker://…/sampler_weights/…``.
            base_model: a base model to sample from.
            retry_config: settings of the retries; None: `RetryConfig()`.
            record_stability_info: let the server keep, for each sample, the data that stable training needs.

        Raises:
            InvalidInputError: neither `model_path` nor `base_model` is given, or the path is not valid.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     prompt = tinker_sync.ModelInput.from_ints([1, 2])
        ...     sampled = sampling.sample(prompt, 1, tinker_sync.SamplingParams(max_tokens=3)).result()
        ...     len(sampled.sequences[0].tokens) <= 3
        True
        """
        return SamplingClient.create(
            self._runtime,
            model_path=model_path,
            base_model=base_model,
            retry_config=retry_config,
            record_stability_info=record_stability_info,
        )

    def create_rest_client(self) -> RestClient:
        """Return a client for runs, checkpoints and sessions on the same server, with the same key.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     service.create_rest_client().get_server_capabilities().result() is not None
        True
        """
        from tinker_sync.clients.rest import RestClient

        return RestClient(self._runtime)

    def create_custom_loss(
        self,
        fn: PerDatumLossFn,
        input_ranks: Mapping[str, CustomLossInputRank],
        *,
        deadline: float | None = None,
    ) -> APIFuture[LossHandle]:
        """Create a loss from a function of torch tensors, for `TrainingClient.forward_backward_custom`.

        The server computes the loss if it supports such losses; otherwise this process does.

        The function is traced once and not called again. It takes ``logprobs`` and, by name, further
        `loss_fn_inputs` of a datum. It returns a scalar and a dict of scalar metrics, named
        ``custom/NAME:sum`` or ``custom/NAME:mean``. The losses of the data are summed. The function may call
        only functions of torch and math, and must not branch on values of tensors. This method blocks until
        the session exists.

        Args:
            fn: the function; its name becomes the name of the loss.
            input_ranks: the number of dimensions of each parameter, 0 to 2.
            deadline: the seconds after which the call is given up.

        Raises:
            InvalidInputError: the function breaks a rule, and the message shows the line; or the session has
                this loss already.
            MissingExtraError: torch is not installed.
            TinkerError: the session could not be created.

        >>> import tinker_sync, torch
        >>> def squared(logprobs, weights):
        ...     loss = (weights * logprobs**2).sum()
        ...     return loss, {"custom/squared:sum": loss}
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     loss = service.create_custom_loss(squared, {"logprobs": 1, "weights": 1}).result()
        ...     inputs = {"target_tokens": [2, 3], "weights": [1.0, 1.0]}
        ...     datum = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1, 2]), inputs)
        ...     passed = training.forward_backward_custom([datum], loss).result()
        >>> passed.metrics["loss:sum"] > 0
        True
        """
        from tinker_sync.losses.create import create

        return create(self._runtime, fn, input_ranks, self._until(deadline))

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> APIFuture[str]:
        """Copy a checkpoint into the project of this client. The future has the path of the copy.

        Args:
            path: the path of the checkpoint.
            ttl_seconds: the number of seconds after which the copy is deleted.
            weights_access_token: a key of another account that may read the checkpoint.

        Raises:
            InvalidInputError: this client has no project.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local", project_id="project-2") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     path = training.save_state("final").result().path
        ...     copy = service.copy_weights(path, ttl_seconds=7200).result()
        >>> copy.startswith("tinker://"), copy != path
        (True, True)
        """
        weights_access_token = self._runtime.connection.mask(weights_access_token)
        return self.create_rest_client().copy_weights(
            path, ttl_seconds=ttl_seconds, weights_access_token=weights_access_token
        )

    def _until(self, deadline: float | None) -> float:
        return self._runtime.server.give_up_at(deadline, _deadlines.CREATE_S)

    create_lora_training_client_async = async_result(create_lora_training_client)
    create_training_client_from_state_async = async_result(create_training_client_from_state)
    create_training_client_from_state_with_optimizer_async = async_result(
        create_training_client_from_state_with_optimizer
    )
    create_sampling_client_async = async_result(create_sampling_client)
