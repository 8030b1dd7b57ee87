"""Optimizers: the family chosen when a model is made, and the settings of each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs

from tinker_sync.types._checks import finite, in_range
from tinker_sync.types._model import Model, model
from tinker_sync.types.scalars import ModelID

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from typing_extensions import Self


class _Open(Model):
    """A family by its `type`, with whatever fields it has; those not declared are attributes all the same."""

    __slots__ = ()

    __open__ = True

    type: str
    _extras: dict[str, Any]

    def __init__(self, *, type: str, **extras: Any) -> None:  # noqa: A002  # the name of the field
        # attrs gives the constructor it makes this name where a class has its own.
        self.__attrs_init__(type=type)
        self._extras.update(extras)

    def __getattr__(self, name: str) -> Any:
        # Only asked for what is no field. Names with an underscore are asked for while unpickling.
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
class OptimizerConfigBase(_Open):
    """An optimizer family this package has no class for; it keeps and sends all fields it is given.

    >>> config = OptimizerConfigBase(type="muon", version=2)
    >>> config.version, config.model_dump()
    (2, {'type': 'muon', 'version': 2})
    """

    type: str
    _extras: dict[str, Any] = _extras_field()


@model
class AdamOptimizerConfig(OptimizerConfigBase):
    """AdamW, the family a model has unless told otherwise.

    >>> AdamOptimizerConfig()
    AdamOptimizerConfig(type='adamw')
    """

    __open__ = False

    type: Literal["adamw"] = "adamw"


@model
class DimuonOptimizerConfig(OptimizerConfigBase):
    """The Dimuon family; its steps take `DimuonParams`.

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
        beta1: decay of the running mean of the gradient.
        beta2: decay of the running mean of the squared gradient.
        eps: added to the denominator.
        weight_decay: decoupled from the gradient.
        grad_clip_norm: the global gradient norm is cut to this; 0 leaves it as it is.

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
class OptimParamsBase(_Open):
    """The settings of one step of a family this package has no class for; keeps and sends all it is given.

    >>> OptimParamsBase(type="muon", learning_rate=0.02).learning_rate
    0.02
    """

    type: str
    _extras: dict[str, Any] = _extras_field()


@model
class DimuonParams(OptimParamsBase):
    """The settings of one Dimuon step. All are finite.

    Attributes:
        learning_rate: the step size, 0 or more.
        grad_clip_norm: the global gradient norm is cut to this; 0 or less leaves it as it is.
        beta1: decay of the momentum, from 0 to less than 1.

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
"""The settings of a step. A mapping without a type becomes `AdamParams`, with one `OptimParamsBase`."""


@model
class OptimStepRequest(Model):
    """One numbered optimizer step of a model.

    The settings may be given under any of their three names; they are kept as `optim_params`, and travel as
    `adam_params` or `optimizer_params` depending on what they are.

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
        self.__attrs_init__(  # type: ignore[attr-defined]  # made by attrs
            optim_params=given[0], model_id=model_id, seq_id=seq_id, type=type
        )

    def _fields_out(self) -> dict[str, Any]:
        fields = super()._fields_out()
        params = fields.pop("optim_params")
        name = "adam_params" if isinstance(params, AdamParams) else "optimizer_params"
        return {**fields, name: params}


@model
class OptimStepResponse(Model):
    """The end of an optimizer step, with the server's measurements of it, if it makes any.

    >>> OptimStepResponse(metrics={"grad_norm": 0.5}).metrics
    {'grad_norm': 0.5}
    """

    __response__ = True

    metrics: dict[str, float] | None = None
