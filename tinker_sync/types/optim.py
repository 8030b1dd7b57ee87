"""The optimizer family of a model, and the settings of each optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs

from tinker_sync.types._checks import finite, in_range
from tinker_sync.types._convert import converter_for
from tinker_sync.types._model import Model, model
from tinker_sync.types.scalars import ModelID
from tinker_sync.types.training import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from typing_extensions import Self


class _OpenModel(Model):
    """The base class of optimizer settings whose `type` names an optimizer family.

    A subclass whose `__open__` is True keeps given fields that it does not declare, as attributes.
    """

    __slots__ = ()

    __open__ = True

    type: str
    _extras: dict[str, Any]

    def __init__(self, *, type: str, **extras: Any) -> None:  # noqa: A002  # the name of the field
        # attrs gives its generated constructor this name in classes with their own one.
        self.__attrs_init__(type=type)
        self._extras.update(extras)

    def __getattr__(self, name: str) -> Any:
        # Python calls this for names that are not fields; unpickling looks up private names.
        if not name.startswith("_") and name in self._extras:
            return self._extras[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _fields_out(self) -> dict[str, Any]:
        return {**super()._fields_out(), **self._extras}

    def _evolved(self, changes: dict[str, Any]) -> Self:
        return type(self)(**{**self._fields_out(), **changes})

    def _repr_items(self) -> Iterable[tuple[str, Any]]:
        return self._fields_out().items()


def _extras_field() -> Any:
    return attrs.field(factory=dict, init=False, hash=False)


@model(init=False)
class OptimizerConfigBase(_OpenModel):
    """An optimizer family that has no class in this package. All given fields are sent.

    It is also the base class of the other families, which take only their declared fields.

    >>> config = OptimizerConfigBase(type="muon", version=2)
    >>> config.version, config.model_dump()
    (2, {'type': 'muon', 'version': 2})
    """

    type: str
    _extras: dict[str, Any] = _extras_field()


@model
class AdamOptimizerConfig(OptimizerConfigBase):
    """The optimizer family AdamW, the default.

    >>> AdamOptimizerConfig()
    AdamOptimizerConfig(type='adamw')
    """

    __open__ = False

    type: Literal["adamw"] = "adamw"


@model
class DimuonOptimizerConfig(OptimizerConfigBase):
    """The optimizer family Dimuon, whose steps take `DimuonParams`.

    >>> DimuonOptimizerConfig()
    DimuonOptimizerConfig(type='dimuon', version=1)
    """

    __open__ = False

    type: Literal["dimuon"] = "dimuon"
    version: Literal[1] = 1


OptimizerConfig: TypeAlias = AdamOptimizerConfig | OptimizerConfigBase
"""The family of a model's optimizer. A mapping of another type than "adamw" becomes `OptimizerConfigBase`."""


@model
class AdamParams(Model):
    """The settings of one AdamW step.

    Attributes:
        learning_rate: the step size.
        beta1: the decay of the running mean of the gradient.
        beta2: the decay of the running mean of the squared gradient.
        eps: the number added to the denominator.
        weight_decay: the decay of the weights, decoupled from the gradient.
        grad_clip_norm: the limit of the global gradient norm; 0 disables clipping.

    >>> AdamParams(learning_rate=1e-5, weight_decay=0.01)
    AdamParams(learning_rate=1e-05, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.01, grad_clip_norm=0.0)
    """

    learning_rate: float = 0.0001
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@model(init=False)
class OptimParamsBase(_OpenModel):
    """The settings of one step of an optimizer family that has no class in this package.

    All given fields are kept and sent. The subclass `DimuonParams` takes only its declared fields.

    >>> OptimParamsBase(type="muon", learning_rate=0.02).learning_rate
    0.02
    """

    type: str
    _extras: dict[str, Any] = _extras_field()


@model
class DimuonParams(OptimParamsBase):
    """The settings of one Dimuon step. All numbers must be finite.

    Attributes:
        learning_rate: the step size, 0 or more.
        grad_clip_norm: the limit of the global gradient norm; 0 or less disables clipping.
        beta1: the decay of the momentum, from 0 to less than 1.

    >>> DimuonParams(learning_rate=0.02)
    DimuonParams(type='dimuon', learning_rate=0.02, grad_clip_norm=0.0, beta1=0.9)
    >>> DimuonParams(learning_rate=0.02, beta1=1)
    Traceback (most recent call last):
        ...
    tinker_sync.errors.InvalidInputError: DimuonParams.beta1: expected 0 or more and less than 1, got 1.0
    """

    __open__ = False

    type: Literal["dimuon"] = "dimuon"
    learning_rate: float = attrs.field(validator=in_range(ge=0))
    grad_clip_norm: float = attrs.field(default=0.0, validator=finite)
    beta1: float = attrs.field(default=0.9, validator=in_range(ge=0, lt=1))


OptimParams: TypeAlias = AdamParams | OptimParamsBase
"""The settings of a step.

A mapping without a type becomes `AdamParams`, one with a type `OptimParamsBase`.
"""


@model
class OptimStepRequest(Model):
    """A request for one optimizer step of a model. `seq_id` is the sequence number of the call.

    The constructor takes the settings under exactly one of three names: `optim_params`, `adam_params` or
    `optimizer_params`. The attribute is always `optim_params`. `AdamParams` are sent as `adam_params`, other
    settings as `optimizer_params`.

    >>> OptimStepRequest(adam_params=AdamParams(), model_id="run-1").optim_params.beta1
    0.9
    >>> request = OptimStepRequest(optim_params=DimuonParams(learning_rate=0.02), model_id="run-1", seq_id=3)
    >>> list(request.model_dump())
    ['model_id', 'seq_id', 'type', 'optimizer_params']
    """

    optim_params: OptimParams
    model_id: ModelID
    seq_id: int | None = None
    type: Literal["optim_step"] = "optim_step"

    def __init__(
        self,
        *,
        model_id: ModelID,
        seq_id: int | None = None,
        type: Literal["optim_step"] = "optim_step",  # noqa: A002  # the name of the field
        optim_params: OptimParams | Mapping[str, Any] | None = None,
        adam_params: OptimParams | Mapping[str, Any] | None = None,
        optimizer_params: OptimParams | Mapping[str, Any] | None = None,
    ) -> None:
        given = [params for params in (optim_params, adam_params, optimizer_params) if params is not None]
        if len(given) != 1:
            raise TypeError(
                "OptimStepRequest.__init__() takes exactly one of optim_params, adam_params and "
                f"optimizer_params, {len(given)} were given"
            )
        self.__attrs_init__(  # type: ignore[attr-defined]  # generated by attrs
            optim_params=given[0], model_id=model_id, seq_id=seq_id, type=type
        )

    def _fields_out(self) -> dict[str, Any]:
        fields = super()._fields_out()
        params = fields.pop("optim_params")
        name = "adam_params" if isinstance(params, AdamParams) else "optimizer_params"
        return {**fields, name: params}


_as_metrics = converter_for(dict[str, float], "OptimStepResponse.metrics")


def _step_metrics(given: Any) -> Metrics | None:
    return None if given is None else Metrics(_as_metrics(given))


@model
class OptimStepResponse(Model):
    """The result of an optimizer step, with the server's metrics; None if it sends none.

    >>> OptimStepResponse(metrics={"grad_norm": 0.5}).metrics
    {'grad_norm': 0.5}
    """

    __response__ = True

    if TYPE_CHECKING:  # nearly every server sends them, so that programs need not check for None
        metrics: dict[str, float]

        def __init__(self, *, metrics: Mapping[str, float] | None = None) -> None: ...
    else:
        metrics: dict[str, float] | None = attrs.field(default=None, converter=_step_metrics)
