"""Creation, description and unloading of models."""

from __future__ import annotations

from typing import Any, Literal

from tinker_sync.types._model import Model, model
from tinker_sync.types.optim import AdamOptimizerConfig, OptimizerConfig
from tinker_sync.types.scalars import ModelID


@model
class LoraConfig(Model):
    """The settings of a LoRA adapter, the part of a model that training changes.

    Attributes:
        rank: the rank of the low-rank matrices.
        seed: the seed of the initial values of the matrices; None lets the server draw one.
        train_unembed: adapt the unembedding layer.
        train_mlp: adapt the feed-forward layers, experts included.
        train_attn: adapt the attention layers.

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
    """A request for a new model. `model_seq_id` is the number of the model among those of its session.

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
    """A request for the description of a model."""

    model_id: ModelID
    type: Literal["get_info"] = "get_info"


@model
class ModelData(Model):
    """The base model that a trained model extends: its architecture, name and tokenizer.

    >>> ModelData(model_name="org/base").tokenizer_id is None
    True
    """

    __response__ = True

    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


@model
class GetInfoResponse(Model):
    """The description of a model.

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
    """A request to unload a model. Only older servers have this call."""

    model_id: ModelID
    type: Literal["unload_model"] = "unload_model"


@model
class UnloadModelResponse(Model):
    """The id of the unloaded model."""

    __response__ = True

    model_id: ModelID
    type: Literal["unload_model"] | None = None
