"""Sampling: the parameters, the request, and the response, whose numbers can be read as arrays or lists."""

from __future__ import annotations

import math
import warnings
from array import array as c_array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import attrs

from tinker_sync._base.numpy import AnyArray, np
from tinker_sync._base.spelling import find_closest
from tinker_sync.errors import InvalidInputError
from tinker_sync.types._arrays import ArrayHead, ByValue
from tinker_sync.types._convert import SCALARS, converter_for
from tinker_sync.types._model import AsDataclass, Model, model
from tinker_sync.types._structured import field_names, refuse, refuse_all
from tinker_sync.types.model_input import ModelInput
from tinker_sync.types.tensor_data import TensorData

if TYPE_CHECKING:
    from typing import TypeAlias

    # The hosted service gives every sequence an id, so checkers need not ask for a test of None.
    SequenceId: TypeAlias = str | Any
else:
    SequenceId = str | None

__all__ = [
    "PromptAltTokens",
    "SampleRequest",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "TopkLogprobs",
]

NO_LOGPROB = -99999.0
"""The log-probability in an empty top-k cell, whose token id is 0."""

Stop: TypeAlias = str | Sequence[str] | Sequence[int] | None
TopkList: TypeAlias = list[list[tuple[int, float]] | None]

_STOP = "SamplingParams.stop"
_as_text = cast("Callable[[Any], str]", converter_for(str, _STOP))


def _stop(given: Any) -> Stop:
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, (bytes, bytearray)):
        return _as_text(given)
    held = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(held, Sequence):
        raise refuse(_STOP, "text, a list of texts or a list of token ids", given)
    items: list[Any] = list(held)
    if all(isinstance(item, (str, bytes)) for item in items):
        items = [_as_text(item) for item in items]
    else:
        items = [_stop_token(index, item) for index, item in enumerate(items)]
    return tuple(items) if isinstance(held, tuple) else items


def _stop_token(index: int, item: Any) -> int:
    try:
        token: int = SCALARS[int](item)
    except InvalidInputError:
        raise refuse(f"{_STOP}[{index}]", "a token id like the others", item) from None
    return token


@model
class SamplingParams(Model):
    """The settings of a sample: its length, its seed, its stop conditions and the choice of each token.
    A `max_tokens` of None allows as many tokens as the context of the model holds.

    >>> SamplingParams(max_tokens=16, temperature=0.7, stop=["\\n"]).top_p
    1.0
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: Stop = attrs.field(default=None, converter=_stop)
    """None stops at the model's end token; an empty list stops only at `max_tokens`."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = -1
    """-1 is off."""
    top_p: float = 1.0

    @classmethod
    def _accept(cls, given: dict[str, Any], unknown: list[str]) -> dict[str, Any] | None:
        """Ignore settings of other engines, as the reference client does, but refuse misspelt ones.

        `max_new_tokens` and the like stand for the limit of other engines. Without any limit, an answer could
        become as long as the model allows, which is slow and costs.
        """
        known = field_names(cast("Any", cls))
        for name in unknown:
            abbreviated = any(each.startswith(name) for each in known)
            limits = "max_tokens" not in given and {"max", "tokens"} <= {*name.split("_")}
            if abbreviated or limits or find_closest(name, known, cutoff=0.85, loosely=False):
                return None
        warnings.warn(
            f"SamplingParams: {', '.join(unknown)} ignored, because the service has no such setting; "
            f"it has: {', '.join(known)}",
            stacklevel=3,
        )
        return {name: value for name, value in given.items() if name not in unknown}

    def __attrs_post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 0:
            raise InvalidInputError(f"SamplingParams.max_tokens: expected 0 or more, got {self.max_tokens}")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidInputError(
                f"SamplingParams.top_p: expected more than 0 and at most 1, got {self.top_p}"
            )
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise InvalidInputError(f"SamplingParams.temperature: expected 0 or more, got {self.temperature}")


def _array(value: Any) -> AnyArray:
    return np.asarray(value)


@model(kw_only=False)
class TopkLogprobs(AsDataclass, Model):
    """The k likeliest tokens at each position, as a matrix of token ids and one of log-probabilities.
    An empty cell has the token 0 and the log-probability -99999.0.

    >>> top = TopkLogprobs(np.array([[5, 6]]), np.array([[-0.1, -2.5]], dtype=np.float32))
    >>> top.token_ids.shape
    (1, 2)
    """

    token_ids: AnyArray = attrs.field(converter=_array, eq=ByValue)
    logprobs: AnyArray = attrs.field(converter=_array, eq=ByValue)

    def to_lists(self) -> TopkList:
        """Return the (token id, log-probability) pairs of each position, without the empty cells at the end.
        A position that begins with an empty cell gives None. Matrices without columns give an empty list.

        Raises:
            InvalidInputError: the arrays are not two matrices of one shape.

        >>> TopkLogprobs(np.array([[5, 0]]), np.array([[-1.5, -99999.0]])).to_lists()
        [[(5, -1.5)]]
        """
        shapes = list(self.token_ids.shape), list(self.logprobs.shape)
        if shapes[0] != shapes[1] or self.token_ids.ndim != 2:
            raise InvalidInputError(f"TopkLogprobs: expected two matrices of one shape, got {shapes}")
        if self.token_ids.size == 0:
            return []
        rows = zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True)
        return [_drop_empty_cells(ids, logprobs) for ids, logprobs in rows]


def _drop_empty_cells(ids: list[int], logprobs: list[float]) -> list[tuple[int, float]] | None:
    cells = list(zip(ids, logprobs, strict=True))
    if cells[0] == (0, NO_LOGPROB):
        return None
    while cells[-1] == (0, NO_LOGPROB):
        cells.pop()
    return cells


@model(kw_only=False)
class PromptAltTokens(AsDataclass, Model):
    """Tokens that the model draws in place of each prompt token after the first, with log-probabilities.
    Row i has the draws for prompt token i + 1. They may repeat a token, or give the prompt's own token.

    >>> tokens, logprobs = TensorData([7, 8], "int64", [1, 2]), TensorData([-1, -2], "float32", [1, 2])
    >>> PromptAltTokens(tokens, logprobs).tokens.tolist()
    [[7, 8]]
    """

    tokens: TensorData
    logprobs: TensorData


def _held(value: Any) -> Any:
    """Return None, and an `array.array` of packed numbers, as they are; return other values as an array."""
    return value if value is None or type(value) is c_array else np.asarray(value)


def _optional_list(value: Any) -> list[Any] | None:
    return None if value is None else list(value)


def _list_field(name: str) -> Any:
    """Return a private field for numbers that are given as a list instead of an array."""
    return attrs.field(default=None, repr=False, converter=_optional_list, alias=name)


class _Views(dict[str, Any]):
    """A cache of lists and arrays that are made on first access. A pickle contains an empty cache."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Views, ()


def _views_field() -> Any:
    return attrs.field(factory=_Views, init=False, repr=False, eq=False)


def _list_view(views: Any, name: str, given: Any, held: Any, convert: Callable[[Any], Any]) -> Any:
    """Return the list `given` or, without it, the list made of the values `held`; None without both.
    The list is made on first use and kept in `views`. If two threads make it at once, both get the same one.
    """
    if given is not None or held is None:
        return given
    return views[name] if name in views else views.setdefault(name, convert(held))


def _listed(held: Any) -> Any:
    return held.tolist()


def _array_view(views: Any, name: str, held: Any) -> AnyArray | None:
    """Return `held` as it is, but an `array.array` as a numpy array, made on first use."""
    if type(held) is not c_array:
        return cast("AnyArray | None", held)
    return cast("AnyArray", views[name] if name in views else views.setdefault(name, np.asarray(held)))


class Decodes(Protocol):
    """The part of a tokenizer that `SampledSequence.text` uses."""

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""


@model(kw_only=False)
class SampledSequence(AsDataclass, Model):
    """One sampled continuation of a prompt: its tokens, their log-probabilities and its stop reason.

    Lists are made on first access. So are the arrays of tokens and log-probabilities of a protobuf response.

    >>> sequence = SampledSequence("length", "seq-1", np.array([5, 6]), np.array([-1.0, -2.0]))
    >>> sequence.tokens, sequence.logprobs
    ([5, 6], [-1.0, -2.0])
    """

    stop_reason: Literal["length", "stop"]
    sequence_id: SequenceId = None
    """The id for provenance spans; None if the server gives no ids."""
    _tokens: AnyArray | Sequence[int] | None = attrs.field(
        default=None, alias="tokens_np", repr=False, converter=_held, eq=ByValue
    )
    _logprobs: AnyArray | Sequence[float] | None = attrs.field(
        default=None, alias="logprobs_np", repr=False, converter=_held, eq=ByValue
    )
    topk_logprobs_np: TopkLogprobs | None = attrs.field(default=None, repr=False)
    _tokens_list: list[int] | None = _list_field("_tokens_list")
    _logprobs_list: list[float] | None = _list_field("_logprobs_list")
    _topk_logprobs_list: TopkList | None = _list_field("_topk_logprobs_list")
    _views: object = _views_field()

    @classmethod
    def _accept(cls, given: dict[str, Any], unknown: list[str]) -> dict[str, Any] | None:  # noqa: ARG003
        """Take `tokens` and `logprobs` as lists, as the reference client did when it had no arrays."""
        older = {"tokens", "logprobs"} & given.keys()
        renamed = {f"_{name}_list" if name in older else name: value for name, value in given.items()}
        return renamed if older else None

    def _repr_items(self) -> Iterator[tuple[str, Any]]:
        yield from super()._repr_items()
        array = self.tokens_np
        yield "tokens", self.tokens if array is None or self._tokens_list is not None else ArrayHead(array)

    @property
    def tokens(self) -> list[int]:
        """The token ids as a list."""
        held = c_array("i") if self._tokens is None else self._tokens
        made: list[int] = _list_view(self._views, "tokens", self._tokens_list, held, _listed)
        return made

    def text(self, tokenizer: Decodes, *, skip_special_tokens: bool = True) -> str:
        """Return the text of the tokens.

        Args:
            tokenizer: the result of a client's `get_tokenizer`, or another tokenizer with this `decode`.
            skip_special_tokens: leave out tokens such as the one that ends a turn.

        >>> import tinker_sync
        >>> tokenizer = tinker_sync.get_tokenizer("tinker-sync/tiny")
        >>> SampledSequence("stop", tokens_np=np.array(tokenizer.encode(" 5"))).text(tokenizer)
        ' 5'
        """
        return tokenizer.decode(self.tokens, skip_special_tokens=skip_special_tokens)

    @property
    def tokens_np(self) -> AnyArray | None:
        """The token ids as an array; None if the sequence was made without `tokens_np`."""
        return _array_view(self._views, "tokens_np", self._tokens)

    @property
    def length(self) -> int:
        """The number of tokens."""
        held = self._tokens if self._tokens_list is None else self._tokens_list
        return 0 if held is None else len(held)

    @property
    def logprobs(self) -> list[float] | None:
        """The log-probability of each token as a list; None, or [] from some servers, if there are none."""
        given = self._logprobs_list
        made: list[float] | None = _list_view(self._views, "logprobs", given, self._logprobs, _listed)
        return made

    @property
    def logprobs_np(self) -> AnyArray | None:
        """The log-probabilities as an array; None if there are none, or if `logprobs_np` was not given."""
        return _array_view(self._views, "logprobs_np", self._logprobs)

    @property
    def topk_logprobs(self) -> TopkList | None:
        """The likeliest tokens at each sampled position, as lists of (token id, log-probability).
        None if the response has none. A position without scores has None in place of its list.
        """
        given, held = self._topk_logprobs_list, self.topk_logprobs_np
        made: TopkList | None = _list_view(self._views, "topk_logprobs", given, held, TopkLogprobs.to_lists)
        return made


_OF_SEQUENCES = {
    "tokens": "tokens",
    "tokens_np": "tokens_np",
    "logprobs": "logprobs",
    "stop_reason": "stop_reason",
    "text": "text(tokenizer)",
    "texts": "text(tokenizer)",
}


@model(kw_only=False)
class SampleResponse(AsDataclass, Model):
    """The result of a sample request: the sampled sequences, and the requested scores of the prompt.

    >>> response = SampleResponse([], np.array([np.nan, -0.5], dtype=np.float32))
    >>> response.prompt_logprobs
    [None, -0.5]
    """

    __response__ = True

    sequences: list[SampledSequence]
    _prompt_logprobs: AnyArray | Sequence[float] | None = attrs.field(
        default=None, alias="prompt_logprobs_np", repr=False, converter=_held, eq=ByValue
    )
    topk_prompt_logprobs_np: TopkLogprobs | None = attrs.field(default=None, repr=False)
    target_prompt_logprobs: TensorData | None = None
    prompt_cache_hit_tokens: int = 0
    prompt_alt_tokens: PromptAltTokens | None = None
    _prompt_logprobs_list: list[float | None] | None = _list_field("_prompt_logprobs_list")
    _topk_prompt_logprobs_list: TopkList | None = _list_field("_topk_prompt_logprobs_list")
    _views: object = _views_field()

    if not TYPE_CHECKING:  # for checkers the names stay unknown

        def __getattr__(self, name: str) -> Any:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if hint := _OF_SEQUENCES.get(name):
                message += f"; each sampled sequence has its own: response.sequences[0].{hint}"
            raise AttributeError(message, name=name, obj=self)

        def __getitem__(self, key: Any) -> Any:
            raise TypeError("'SampleResponse' object has no items; write response.sequences[0]")

    @property
    def prompt_logprobs(self) -> list[float | None] | None:
        """The log-probability of each prompt token as a list; None if the response has none.
        A token without a score, such as the first one, has None.
        """
        given, held = self._prompt_logprobs_list, self._prompt_logprobs
        made: list[float | None] | None = _list_view(
            self._views, "prompt_logprobs", given, held, _replace_nan
        )
        return made

    @property
    def prompt_logprobs_np(self) -> AnyArray | None:
        """The log-probability of each prompt token as an array, with NaN for a token without a score.
        None if the response has none, or was made without `prompt_logprobs_np`.
        """
        return _array_view(self._views, "prompt_logprobs_np", self._prompt_logprobs)

    @property
    def topk_prompt_logprobs(self) -> TopkList | None:
        """The likeliest tokens at each prompt position, as lists of (token id, log-probability).
        None if the response has none. A position without scores has None in place of its list.
        """
        given, held = self._topk_prompt_logprobs_list, self.topk_prompt_logprobs_np
        made: TopkList | None = _list_view(
            self._views, "topk_prompt_logprobs", given, held, TopkLogprobs.to_lists
        )
        return made


def _replace_nan(held: AnyArray) -> list[float | None]:
    return [value if value == value else None for value in held.tolist()]


@model
class SampleRequest(Model):
    """A request for `num_samples` continuations of a prompt.

    >>> prompt = ModelInput.from_ints([1, 2])
    >>> SampleRequest(prompt=prompt, sampling_params=SamplingParams(max_tokens=4)).num_samples
    1
    """

    num_samples: int = 1
    prompt: ModelInput
    sampling_params: SamplingParams
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: TensorData | None = None
    """Token ids to score, one row for each prompt position after the first; -1 is ignored."""
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None
    type: Literal["sample"] = "sample"

    def validate(self) -> None:
        """Check the request without sending it, and report all problems in one error.

        Raises:
            InvalidInputError: `problems` lists each problem with its path.

        >>> SampleRequest(
        ...     prompt=ModelInput.from_ints([1]), sampling_params=SamplingParams(), num_samples=0
        ... ).validate()
        Traceback (most recent call last):
            ...
        tinker_sync.errors.InvalidInputError: num_samples: expected 1 or more, got 0
        """
        if problems := list(self._problems()):
            refuse_all(problems)

    def _problems(self) -> Iterator[str]:
        if self.num_samples < 1:
            yield f"num_samples: expected 1 or more, got {self.num_samples}"
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
            if getattr(self, name) < 0:
                yield f"{name}: expected 0 or more, got {getattr(self, name)}"
        for problem in self.prompt._problems():
            yield f"prompt{problem}"
        if self.prompt_logprobs_last_n is not None:
            yield from self._last_n_problems(self.prompt_logprobs_last_n)
        if self.target_prompt_logprobs is not None:
            yield from self._target_problems(self.target_prompt_logprobs)

    def _last_n_problems(self, last_n: int) -> Iterator[str]:
        length = self.prompt.known_length()
        if last_n < 1:
            yield f"prompt_logprobs_last_n: expected 1 or more, got {last_n}"
        elif length is not None and last_n > length - 1:
            most = length - 1
            yield f"prompt_logprobs_last_n: expected at most {most} for a prompt of {length}, got {last_n}"
        if not self.prompt_logprobs:
            yield "prompt_logprobs_last_n: needs prompt log-probabilities; set include_prompt_logprobs=True"

    def _target_problems(self, targets: TensorData) -> Iterator[str]:
        length = self.prompt.known_length()
        shape = targets.shape if targets.shape is not None else list(targets._numpy.shape)
        if targets.dtype != "int64":
            yield f"target_prompt_logprobs: expected int64 token ids, got {targets.dtype}"
        if len(shape) != 2:
            yield f"target_prompt_logprobs: expected two dimensions, got shape {shape}"
        elif length is not None and shape[0] != length - 1:
            yield (
                f"target_prompt_logprobs: expected {length - 1} rows, "
                f"one for each prompt token after the first, got {shape[0]}"
            )
