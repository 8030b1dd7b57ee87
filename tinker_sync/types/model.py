"""Models: making one, asking about one, and what the server offers."""

from __future__ import annotations

from typing import Any, Literal

from tinker_sync.types._model import Model, model
from tinker_sync.types.optim import AdamOptimizerConfig, OptimizerConfig
from tinker_sync.types.scalars import ModelID


@model
class LoraConfig(Model):
    """The adapter of a new model.

    Attributes:
        rank: of the low-rank matrices.
        seed: of their first values; the server draws one when None.
        train_unembed: whether the unembedding layer gets an adapter.
        train_mlp: whether the feed-forward layers do, experts included.
        train_attn: whether the attention layers do.

    >>> LoraConfig(rank=32, train_unembed=False)
    LoraConfig(rank=32, seed=None, train_unembed=False, train_mlp=True, train_attn=True)
    """

    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


@model
class CreateModelRequest(Model):
    """Ask for a new model; `model_seq_id` numbers the models of a session from 0.

    >>> request = CreateModelRequest(session_id="s-1", model_seq_id=0, base_model="org/base")
    >>> request.optimizer_config
    AdamOptimizerConfig(type='adamw')
    """

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    type: Literal["create_model"] = "create_model"


@model
class CreateModelResponse(Model):
    """The new model's id."""

    __response__ = True

    model_id: ModelID
    type: Literal["create_model"] = "create_model"


@model
class GetInfoRequest(Model):
    """Ask what a model is."""

    model_id: ModelID
    type: Literal["get_info"] = "get_info"


@model
class ModelData(Model):
    """The base of a model: architecture, name, and where its tokenizer comes from.

    >>> ModelData(model_name="org/base").tokenizer_id is None
    True
    """

    __response__ = True

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


@model
class GetInfoResponse(Model):
    """What a model is.

    >>> info = GetInfoResponse(model_data={"arch": "dense"}, model_id="run-1", is_lora=True, lora_rank=32)
    >>> info.model_data.arch
    'dense'
    """

    __response__ = True

    type: Literal["get_info"] | None = None
    model_data: ModelData
    model_id: ModelID
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None


@model
class UnloadModelRequest(Model):
    """Tell the server that a model is no longer needed. Only older servers have this call."""

    model_id: ModelID
    type: Literal["unload_model"] = "unload_model"


@model
class UnloadModelResponse(Model):
    """The model that was unloaded."""

    __response__ = True

    model_id: ModelID
    type: Literal["unload_model"] | None = None


@model
class SupportedModel(Model):
    """A base model the server offers: its context in tokens, and whether it can train and sample it now.

    >>> SupportedModel(model_name="org/base", trainable=True).sampleable is None
    True
    """

    __response__ = True

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


@model
class GetServerCapabilitiesResponse(Model):
    """What the server offers.

    >>> offered = GetServerCapabilitiesResponse(supported_models=[{"model_name": "org/base"}])
    >>> [each.model_name for each in offered.supported_models]
    ['org/base']
    """

    __response__ = True

    supported_models: list[SupportedModel]
