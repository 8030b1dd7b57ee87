"""Saving, loading, copying and uploading weights: requests and results; last, the union of all results.

The upload is experimental: the service may change it. A request may carry an access token for another user's
weights; reprs and errors hide the token.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Literal, TypeAlias

import attrs

from tinker_sync.types._console import checkpoint_url, playground_url
from tinker_sync.types._model import Model, model
from tinker_sync.types.checkpoint import ParsedCheckpointTinkerPath, host_only
from tinker_sync.types.future import RequestFailedResponse, TryAgainResponse
from tinker_sync.types.model import CreateModelResponse, LoraConfig, UnloadModelResponse
from tinker_sync.types.optim import AdamOptimizerConfig, OptimizerConfig, OptimStepResponse
from tinker_sync.types.scalars import ModelID
from tinker_sync.types.training import ForwardBackwardOutput

SamplingClientKind = Literal["snapshot", "inflight"]
"""Snapshot weights stay as saved. Each later inflight save of the same model replaces inflight weights."""


def _token_field() -> Any:
    return attrs.field(default=None, repr=False)


# ---------------------------------------------------------------------------------------------- saving


@model
class SaveWeightsRequest(Model):
    """A request to save a model's weights and optimizer state.

    Attributes:
        path: the name of the checkpoint, not a path.
        ttl_seconds: the time after which the server may delete it; None means never.
        overwrite: replace a checkpoint of the same name, and its metadata.

    >>> SaveWeightsRequest(model_id="run-1", path="step-100", seq_id=7).overwrite
    False
    """

    model_id: ModelID
    path: str | None = None
    seq_id: int | None = None
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


@model
class SaveWeightsResponse(Model):
    """The path of the saved weights and optimizer state.

    >>> SaveWeightsResponse(path="tinker://run-1/weights/final").get_console_url()
    'https://tinker.thinkingmachines.ai/checkpoints/run-1/weights%2Ffinal'
    """

    __response__ = True

    path: str
    type: Literal["save_weights"] | None = None

    def get_console_url(self) -> str:
        """Return the address of the checkpoint in the web console.

        Raises `InvalidInputError` for a malformed path.
        """
        return _console_url(self.path)


@model
class SaveWeightsForSamplerRequest(Model):
    """A request to save a model's weights for sampling.

    A save with a name is a checkpoint. A save without a name serves one new sampling session.

    Attributes:
        path: the name of the checkpoint; None with `sampling_session_seq_id`.
        sampling_session_seq_id: the number of the future sampling session within its session.
        ttl_seconds: the time after which the server may delete it; None means never.
        kind: ``"snapshot"`` keeps the weights of this save. ``"inflight"`` sets them in the samplers of all
            earlier inflight saves of the model too, and later inflight saves replace them.

    >>> SaveWeightsForSamplerRequest(model_id="run-1", sampling_session_seq_id=0, seq_id=7).path is None
    True
    """

    model_id: ModelID
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: SamplingClientKind = "snapshot"
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"


@model
class SaveWeightsForSamplerResponse(Model):
    """The path of weights that were saved for sampling.

    >>> saved = SaveWeightsForSamplerResponse(path="tinker://run-1/sampler_weights/a")
    >>> saved.get_console_url()
    'https://tinker.thinkingmachines.ai/checkpoints/run-1/sampler_weights%2Fa'
    >>> saved.get_playground_url()
    'https://tinker.thinkingmachines.ai/playground?mode=checkpoint&checkpoint=tinker%3A%2F%2Frun-1%2F...'
    """

    __response__ = True

    path: str
    type: Literal["save_weights_for_sampler"] | None = None

    def get_console_url(self) -> str:
        """Return the address of the checkpoint in the web console.

        Raises `InvalidInputError` for a malformed path.
        """
        return _console_url(self.path)

    def get_playground_url(self) -> str:
        """Return the address of the console's playground, a page on which people try out the checkpoint."""
        return playground_url(self.path)


@model
class SaveWeightsForSamplerResponseInternal(Model):
    """The server's answer to a save for sampling: the path of a named save, or the sampling session."""

    __response__ = True

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = None


@model
class SaveWeightsExternalRequest(Model):
    """A request to export a model's adapter as files to download.

    Attributes:
        path: the name of the checkpoint, not a path.
        age_encryption_recipients: public keys of the age format; the owner of any of them can decrypt the
            files. None exports files without encryption.

    >>> SaveWeightsExternalRequest(model_id="run-1", path="final").age_encryption_recipients is None
    True
    """

    model_id: ModelID
    path: str
    seq_id: int | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None
    type: Literal["save_weights_external"] = "save_weights_external"


@model
class SaveWeightsExternalResponse(Model):
    """The path of the exported files; `get_external_weights_urls` of a REST client returns their addresses.

    >>> SaveWeightsExternalResponse(path="tinker://run-1/external_weights/final").path
    'tinker://run-1/external_weights/final'
    """

    __response__ = True

    path: str
    type: Literal["save_weights_external"] | None = None


@model
class SaveWeightsExternalResponseInternal(Model):
    """The server's answer to an export: the path and the size of the exported files."""

    __response__ = True

    path: str | None = None
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = None


def _console_url(path: str) -> str:
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    return checkpoint_url(parsed.training_run_id, parsed.checkpoint_id)


# ------------------------------------------------------------------------------------ loading, copying


@model
class LoadWeightsRequest(Model):
    """A request to load a checkpoint into a model: an existing one (`model_id`) or a new one of a session.

    Attributes:
        session_id: the session of the new model, given with `model_seq_id` and without `model_id`.
        base_model: another base for the new model, such as one with a longer context.
        path: the checkpoint's ``tinker://`` path.
        optimizer: load the optimizer state too.
        optimizer_config: the optimizer of a new model that loads weights only.
        weights_access_token: the permission to read another user's weights.

    >>> request = LoadWeightsRequest(
    ...     session_id="s-1", model_seq_id=0, path="tinker://run-1/weights/a", optimizer=True
    ... )
    >>> request.model_dump(exclude_none=True)["optimizer"]
    True
    """

    model_id: ModelID | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = _token_field()
    type: Literal["load_weights"] = "load_weights"


@model
class LoadWeightsResponse(Model):
    """The answer to a load: the path of the checkpoint, and the id of the model that loaded it.

    >>> LoadWeightsResponse(path="tinker://run-1/weights/a").model_id is None
    True
    """

    __response__ = True

    path: str | None = None
    model_id: ModelID | None = None
    type: Literal["load_weights"] | None = None


@model
class CopyWeightsRequest(Model):
    """A request to copy a checkpoint into a new training run.

    The run belongs to the project `destination_project_id`, or to a session, with the number `model_seq_id`
    among the models of the session.

    >>> request = CopyWeightsRequest(source_path="tinker://run-1/weights/a", weights_access_token="secret")
    >>> "secret" in repr(request)
    False
    """

    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: int | None = None
    weights_access_token: str | None = _token_field()


@model
class CopyWeightsResponse(Model):
    """The path of the copied checkpoint."""

    __response__ = True

    tinker_path: str


@model
class WeightsInfoResponse(Model):
    """The description of a checkpoint: what a client needs to create a model that can load it.

    >>> WeightsInfoResponse(base_model="org/base", is_lora=True, lora_rank=32).optimizer_config.type
    'adamw'
    """

    __response__ = True

    base_model: str
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


@model
class ExternalWeightsUploadStartRequest(Model):
    """A request to begin the upload of an adapter.

    Attributes:
        base_model: the model of the adapter.
        lora_config: the configuration of the adapter.
        destination_project_id: the target project; None means the default one.

    >>> ExternalWeightsUploadStartRequest(base_model="org/base", lora_config={"rank": 8}).lora_config.rank
    8
    """

    base_model: str
    lora_config: LoraConfig
    destination_project_id: str | None = None


@model
class ExternalWeightsUploadStartResult(Model):
    """A started upload: a signed URL for each file, which accepts a PUT until `expires`.

    Such a URL grants access to the file, so the repr shows only its host.

    >>> ExternalWeightsUploadStartResult(
    ...     upload_id="up-1", urls={"a.bin": "https://files.example/x?sig=abc"}, expires="2026-01-31"
    ... )
    ExternalWeightsUploadStartResult(upload_id='up-1', urls={'a.bin': 'https://files.example/…'}, expires=...)
    """

    __response__ = True

    upload_id: str
    urls: dict[str, str] = attrs.field(repr=False)
    expires: datetime

    def _repr_items(self) -> Iterable[tuple[str, Any]]:
        hosts = {path: host_only(url) for path, url in self.urls.items()}
        return (("upload_id", self.upload_id), ("urls", hosts), ("expires", self.expires))


@model
class ExternalWeightsUploadFinishRequest(Model):
    """A request to finish an upload after all files have been sent."""

    upload_id: str


@model
class ExternalWeightsUploadFinishResult(Model):
    """The path of the checkpoint that was created from an upload.

    >>> ExternalWeightsUploadFinishResult(tinker_path="tinker://run-1/external_weights/up-1").tinker_path
    'tinker://run-1/external_weights/up-1'
    """

    __response__ = True

    tinker_path: str


FutureRetrieveResponse: TypeAlias = (
    TryAgainResponse
    | ForwardBackwardOutput
    | OptimStepResponse
    | SaveWeightsResponse
    | LoadWeightsResponse
    | SaveWeightsForSamplerResponse
    | SaveWeightsExternalResponse
    | CreateModelResponse
    | UnloadModelResponse
    | RequestFailedResponse
)
"""The possible answers to a poll for the result of a training request."""
