"""Forward and backward passes: requests and results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, cast

import attrs

from tinker_sync._base.spelling import find_closest
from tinker_sync.errors import InvalidInputError
from tinker_sync.types._convert import converter_for
from tinker_sync.types._model import AsDataclass, Model, model
from tinker_sync.types._structured import described_class, is_foreign, model_from, refuse_all
from tinker_sync.types.datum import Datum, LossFnOutput, are_surely_valid
from tinker_sync.types.tensor_data import TensorData

if TYPE_CHECKING:
    from typing import TypeAlias

__all__ = ["ForwardBackwardInput", "ForwardBackwardOutput", "ForwardBackwardRequest", "ForwardRequest"]

LossFnConfig: TypeAlias = Mapping[str, float | str]

_BY_PROVENANCE = "stable_reinforce"
"""The loss that takes log-probabilities from the server's record of the sampled sequences."""
_SAMPLED = ("target_tokens", "logprobs", "advantages")
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "cross_entropy": ("target_tokens",),
    "importance_sampling": _SAMPLED,
    "ppo": _SAMPLED,
    "cispo": _SAMPLED,
    "dro": _SAMPLED,
    "gspo": (*_SAMPLED, "sequence_ratio_mask"),
    _BY_PROVENANCE: ("target_tokens", "advantages"),
}
"""The inputs that each loss of the service needs. The server checks the inputs of other losses."""

_KNOWN = frozenset(name for names in _NEEDED.values() for name in names)

_SINGLE = "data: expected a list of Datum, got a single one; write [datum]"

_DATUMS_ONLY = {Datum}

REFERENCE: Final = "reference_logprobs"
"""The input with the log-probabilities of a reference model, for ready-made losses. Servers refuse it."""


def listed_data(given: Iterable[Datum], *, with_reference: bool = True) -> list[Datum]:
    """Return the examples of a call in a new list.

    Args:
        given: the examples.
        with_reference: False leaves out the input `reference_logprobs`, in copies of the datums that have it.

    Raises:
        InvalidInputError: `given` is a single datum.
        TypeError: `given` does not consist of datums.
    """
    if isinstance(given, Datum):
        raise InvalidInputError(_SINGLE)
    data = _data(given)
    if not with_reference:
        for index, datum in enumerate(data):
            if REFERENCE in datum.loss_fn_inputs:
                kept = {name: each for name, each in datum.loss_fn_inputs.items() if name != REFERENCE}
                data[index] = datum.model_copy(update={"loss_fn_inputs": kept})
    return data


def _data(given: Any) -> list[Datum]:
    if isinstance(given, Datum):
        raise TypeError(_SINGLE)
    if type(given) is not list and (
        isinstance(given, (str, Mapping, Model)) or not isinstance(given, Iterable)
    ):
        raise TypeError(f"data: expected a list of Datum, got {type(given).__name__}")
    data = list(given)
    if set(map(type, data)) != _DATUMS_ONLY:
        for index, datum in enumerate(data):
            if is_foreign(Datum, datum):
                data[index] = model_from(Datum, datum, f"data[{index}]")
            elif not isinstance(datum, Datum):
                raise TypeError(f"data[{index}]: expected a Datum, got {described_class('Datum', datum)}")
    return data


def _config(given: Any) -> LossFnConfig:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"loss_fn_config: expected a mapping of names to numbers or text, got {type(given).__name__}"
        )
    return {name: _setting(name, value) for name, value in given.items()}


def _setting(name: str, value: Any) -> float | str:
    if isinstance(value, str):
        return value
    # A converter for each call lets the error name the setting; settings are few.
    convert = cast("Callable[[Any], float]", converter_for(float, f"loss_fn_config[{name!r}]"))
    return convert(value)


@model(kw_only=False)
class ForwardBackwardInput(AsDataclass, Model):
    """The input of a training pass: the examples, the loss, and the settings of the loss.

    >>> from tinker_sync.types import ModelInput
    >>> example = Datum(ModelInput.from_ints([1]), {"target_tokens": [2]})
    >>> ForwardBackwardInput([example], "cross_entropy").loss_fn
    'cross_entropy'
    """

    data: list[Datum] = attrs.field(converter=_data)
    loss_fn: str
    loss_fn_config: LossFnConfig | None = attrs.field(
        default=None, converter=attrs.converters.optional(_config)
    )

    if TYPE_CHECKING:  # for type checkers: the constructor accepts more types than the fields hold

        def __init__(
            self, data: Iterable[Datum], loss_fn: str, loss_fn_config: LossFnConfig | None = None
        ) -> None: ...

    def validate(self) -> None:
        """Check that there is a datum, and that each one is valid and has the inputs that a known loss needs.

        Raises:
            InvalidInputError: `problems` names each place, such as ``data[3].loss_fn_inputs['weights'][17]``.

        >>> ForwardBackwardInput([], "cross_entropy").validate()
        Traceback (most recent call last):
            ...
        tinker_sync.errors.InvalidInputError: data: is empty; give at least one Datum
        """
        needed = frozenset(_NEEDED.get(self.loss_fn, ()))
        # An input that is no `TensorData` lacks its attributes; the full check names it.
        with suppress(AttributeError):
            if self.data and self.loss_fn != _BY_PROVENANCE and are_surely_valid(self.data, needed):
                return
        if problems := list(self._problems()):
            refuse_all(problems)

    def _problems(self) -> Iterator[str]:
        if not self.data:
            yield "data: is empty; give at least one Datum"
        needed = _NEEDED.get(self.loss_fn, ())
        for index, datum in enumerate(self.data):
            for name in needed:
                if name not in datum.loss_fn_inputs:
                    yield _missing(name, f"data[{index}]", self.loss_fn, datum)
            if self.loss_fn == _BY_PROVENANCE and not datum.loss_fn_input_spans:
                yield (
                    f"data[{index}].loss_fn_input_spans: are missing; {self.loss_fn} needs the provenance of "
                    "the targets: data.from_samples and Datum.with_provenance add it"
                )
            for problem in datum._problems():
                yield f"data[{index}]{problem}"


def _missing(name: str, path: str, loss_fn: str, datum: Datum) -> str:
    others = [other for other in datum.loss_fn_inputs if other not in _KNOWN]
    close = find_closest(name, others)
    hint = f"; did you mean it by {close!r}?" if close else ""
    return f"{path}.loss_fn_inputs[{name!r}]: is missing; {loss_fn} needs it{hint}"


@model(kw_only=False)
class ForwardBackwardRequest(AsDataclass, Model):
    """A request for one forward and backward pass of a model. `seq_id` is the sequence number of the call."""

    forward_backward_input: ForwardBackwardInput
    model_id: str
    seq_id: int | None = None


@model(kw_only=False)
class ForwardRequest(AsDataclass, Model):
    """A request for one forward pass of a model, for servers that do not know the field `forward_only`."""

    forward_input: ForwardBackwardInput
    model_id: str
    seq_id: int | None = None


_TENSORS_ONLY = {TensorData}


def _outputs(given: Any) -> list[LossFnOutput]:
    outputs = list(given)
    # The decoder gives thousands of records, all of `TensorData`: check them in one step.
    if _TENSORS_ONLY.issuperset(map(type, chain.from_iterable([output.values() for output in outputs]))):
        return outputs
    for index, output in enumerate(outputs):
        if not all(isinstance(tensor, TensorData) for tensor in output.values()):
            where = f"ForwardBackwardOutput.loss_fn_outputs[{index}]"
            outputs[index] = {
                name: model_from(TensorData, tensor, f"{where}[{name!r}]") for name, tensor in output.items()
            }
    return outputs


class Metrics(dict[str, float]):
    """The metrics of a result by name. An error for a name that is not there lists those that are.

    >>> Metrics({"loss:sum": 6.0, "loss:mean": 1.5})["loss"]
    Traceback (most recent call last):
        ...
    KeyError: "there is no metric 'loss'; there are loss:sum, loss:mean"
    """

    def __missing__(self, name: str) -> float:
        found = f"there are {', '.join(map(str, self))}" if self else "the server sent none"
        raise KeyError(f"there is no metric {name!r}; {found}")


@model(kw_only=False)
class ForwardBackwardOutput(AsDataclass, Model):
    """The result of a training pass: named tensors for each datum, and metrics named ``name:reduction``.

    >>> ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 1.5}).metrics["loss:sum"]
    1.5
    """

    __response__ = True

    loss_fn_output_type: str
    loss_fn_outputs: list[LossFnOutput] = attrs.field(converter=_outputs)
    metrics: dict[str, float] = attrs.field(factory=Metrics, converter=Metrics)

    if not TYPE_CHECKING:  # it would allow every name

        def __getattr__(self, name: str) -> Any:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name == "loss":
                message += "; it is one of the metrics: result.metrics['loss:sum']"
            raise AttributeError(message, name=name, obj=self)
