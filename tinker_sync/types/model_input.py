"""The input of a model: chunks of tokens, images and audio, and `ModelInput`, a list of chunks."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import attrs

from tinker_sync._numpy import AnyArray, Int32Array, np
from tinker_sync.errors import InvalidInputError
from tinker_sync.types import _chat
from tinker_sync.types._arrays import (
    least_of,
    packed_int32,
    quick_hash,
    refuse_range_beyond_int32,
    same_values,
    token_container,
    tokens_as_int32,
    unpacked_int32,
)
from tinker_sync.types._model import Model, model, refuse
from tinker_sync.types._pictures import inspect_image

if TYPE_CHECKING:
    from typing import TypeAlias

    from typing_extensions import Self

__all__ = [
    "DmelChunk",
    "EncodedTextChunk",
    "ImageAssetPointerChunk",
    "ImageChunk",
    "ModelInput",
    "ModelInputChunk",
]

TokenSequence: TypeAlias = Sequence[int] | AnyArray


class Encodes(Protocol):
    """A tokenizer, as far as `ModelInput.from_text` uses it."""

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenSequence:
        """Return the token ids of a text."""


class RendersChats(Protocol):
    """A tokenizer, as far as `ModelInput.from_chat` uses it."""

    def apply_chat_template(self, conversation: Any, /, **options: Any) -> Any:
        """Return the token ids of a chat."""


_TOKENS = "EncodedTextChunk.tokens"


def _check_tokens(given: Any) -> TokenSequence:
    """Check every id, and return the container to keep."""
    tokens = token_container(given, _TOKENS)
    if isinstance(tokens, (list, tuple)):
        if packed_int32(tokens) is not None and [*map(type, tokens)].count(int) == len(tokens):
            return tokens
        # Keep the converted values of text such as "4", whole floats and numpy's integers.
        plain: list[int] = tokens_as_int32(tokens, _TOKENS).tolist()
        return tuple(plain) if isinstance(tokens, tuple) else plain
    if isinstance(tokens, range):
        refuse_range_beyond_int32(tokens, _TOKENS)
        return tokens
    array = cast("AnyArray", tokens)
    if array.ndim == 1 and array.dtype == np.int32:
        return array
    exact = tokens_as_int32(array, _TOKENS)
    return array if array.dtype.kind in "iu" else exact


@model
class EncodedTextChunk(Model):
    """Token ids; a given array is kept and shared, a list is copied.

    >>> EncodedTextChunk(tokens=[1, 2, 3]).length
    3
    >>> EncodedTextChunk(tokens=range(3)) == EncodedTextChunk(tokens=np.arange(3))
    True
    """

    _packed: bytes | None = attrs.field(default=None, init=False, repr=False)
    # Not set while the ids of a list are packed: most lists go into a request and are never read.
    tokens: TokenSequence
    type: Literal["encoded_text"] = "encoded_text"

    def __init__(
        self,
        *,
        tokens: TokenSequence,
        type: Literal["encoded_text"] = "encoded_text",  # noqa: A002  # the name of the field
    ) -> None:
        put = object.__setattr__
        packed = packed_int32(tokens) if isinstance(tokens, list) else None
        put(self, "_packed", packed)
        if packed is None:
            put(self, "tokens", _check_tokens(tokens))
        if type != "encoded_text":
            raise refuse("EncodedTextChunk.type", "one of 'encoded_text'", type)
        put(self, "type", "encoded_text")

    if not TYPE_CHECKING:  # it would allow every name

        def __getattr__(self, name: str) -> Any:
            """Return the ids of a list, at the first reading of `tokens`."""
            if name != "tokens":
                raise AttributeError(name)
            tokens = unpacked_int32(self._packed)
            object.__setattr__(self, "tokens", tokens)
            return tokens

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.tokens) if self._packed is None else len(self._packed) // 4

    def listed(self) -> list[int]:
        """Return the ids as a list, for a writer of JSON; the chunk does not keep the list."""
        if self._packed is not None:
            return unpacked_int32(self._packed)
        held: Any = self.tokens
        return held.tolist() if hasattr(held, "tolist") else [*held]

    def as_int32(self) -> Int32Array:
        """Return the ids as a contiguous int32 array; the user's array itself if it already is one."""
        if self._packed is not None:
            return np.frombuffer(self._packed, "<i4")
        tokens: Any = self.tokens
        if type(tokens) is np.ndarray and tokens.dtype == np.int32 and tokens.flags.c_contiguous:
            return cast("Int32Array", tokens)
        return tokens_as_int32(self.tokens, _TOKENS)

    def _has_negative(self) -> bool:
        if self._packed is not None:
            return not self._packed[3::4].isascii()  # the highest bit of the last byte is the sign
        return len(self.tokens) > 0 and least_of(self.tokens) < 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EncodedTextChunk):
            return NotImplemented
        return self is other or same_values(self.as_int32(), other.as_int32())

    def __hash__(self) -> int:
        return quick_hash(self.as_int32())


class _Picture(Model):
    """The base of both image chunks, with a length if the user gives one."""

    __slots__ = ()

    expected_tokens: int | None

    @property
    def length(self) -> int:
        """The expected number of tokens. Raises `InvalidInputError` if `expected_tokens` is not set."""
        if self.expected_tokens is None:
            raise InvalidInputError(f"{type(self).__name__}: the length is not known; set expected_tokens")
        return self.expected_tokens


_MODES = {"png": ("1", "L", "LA", "I;16", "P", "RGB", "RGBA"), "jpeg": ("L", "RGB", "CMYK")}
"""The pixel modes that a format can hold; others are converted to RGB."""


@model
class ImageChunk(_Picture):
    """An image file's bytes. Base64 text is decoded.

    >>> ImageChunk(data=b"...", format="png", expected_tokens=64).length
    64
    """

    data: bytes
    format: Literal["png", "jpeg"]
    expected_tokens: int | None = None
    type: Literal["image"] = "image"

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview, *, expected_tokens: int | None = None) -> Self:
        """Create a chunk from a complete PNG or JPEG file; the header gives its format.

        Args:
            data: the file's bytes.
            expected_tokens: the number of tokens of the image, if known.

        Raises:
            InvalidInputError: the file is of another format, damaged, truncated or without pixels.

        >>> ImageChunk.from_bytes(b"GIF89a")
        Traceback (most recent call last):
        tinker_sync.errors.InvalidInputError: data: expected a PNG or JPEG file, got GIF
        """
        return cls._from_bytes(bytes(data), "data", expected_tokens)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, expected_tokens: int | None = None) -> Self:
        """Create a chunk from an image file, as `from_bytes` does; the extension of its name is ignored."""
        with open(path, "rb") as file:
            return cls._from_bytes(file.read(), os.fspath(path), expected_tokens)

    @classmethod
    def from_image(
        cls,
        image: Any,
        *,
        format: Literal["png", "jpeg"] = "png",  # noqa: A002  # the name of the field and of Pillow's argument
        expected_tokens: int | None = None,
    ) -> Self:
        """Create a chunk from an image of Pillow.

        Args:
            image: a `PIL.Image.Image`.
            format: the file format; "jpeg" is smaller, loses detail and drops transparency.
            expected_tokens: the number of tokens of the image, if known.

        Raises:
            InvalidInputError: `image` is not an image of Pillow.
        """
        if not callable(getattr(image, "save", None)) or not isinstance(getattr(image, "mode", None), str):
            raise InvalidInputError(f"image: expected an image of Pillow, got a {type(image).__name__}")
        if format not in _MODES:
            raise InvalidInputError(f"format: expected 'png' or 'jpeg', got {format!r}")
        if image.mode not in _MODES[format]:
            image = image.convert("RGB")
        file = io.BytesIO()
        image.save(file, format=format.upper())
        return cls._from_bytes(file.getvalue(), "image", expected_tokens)

    @classmethod
    def _from_bytes(cls, data: bytes, where: str, expected_tokens: int | None) -> Self:
        return cls(data=data, format=inspect_image(data, where).format, expected_tokens=expected_tokens)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, from the file's header. Raises `InvalidInputError` if it is damaged."""
        picture = inspect_image(self.data, "ImageChunk.data")
        return picture.width, picture.height


@model
class ImageAssetPointerChunk(_Picture):
    """An image that the server fetches itself. Training requests can send it in JSON, not in protobuf.

    >>> ImageAssetPointerChunk(format="png", location="asset://cat", expected_tokens=64).length
    64
    """

    format: Literal["png", "jpeg"]
    location: str
    expected_tokens: int | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"


@model
class DmelChunk(Model):
    """Audio: a serialized tensor container of discretised mel frames. Base64 text is decoded.

    >>> DmelChunk(dmel=bytes([0, 1, 12])).length
    12
    """

    dmel: bytes
    type: Literal["dmel"] = "dmel"

    @property
    def length(self) -> int:
        """The container's first dimension. Raises `InvalidInputError` if the header is damaged."""
        return _container_shape(self.dmel)[0]


ModelInputChunk: TypeAlias = EncodedTextChunk | ImageAssetPointerChunk | ImageChunk | DmelChunk
"""One piece of a prompt."""


@model
class ModelInput(Model):
    """A prompt or a training input: chunks in order.

    >>> prompt = ModelInput.from_ints([1, 2]).append_int(3)
    >>> prompt.length, prompt.to_ints()
    (3, [1, 2, 3])
    """

    __made_by__ = "ModelInput.from_ints(token_ids) or ModelInput.from_text(text, tokenizer)"

    chunks: list[ModelInputChunk]

    if TYPE_CHECKING:  # for type checkers: the constructor accepts more types than the field holds

        def __init__(self, *, chunks: Iterable[ModelInputChunk]) -> None: ...

    @classmethod
    def from_ints(cls, tokens: TokenSequence) -> Self:
        """Create an input of one text chunk; a numpy array is kept without a copy.

        >>> ModelInput.from_ints(np.arange(4)).length
        4
        """
        return cls(chunks=[EncodedTextChunk(tokens=tokens)])

    @classmethod
    def from_text(cls, text: str, tokenizer: Encodes, *, add_special_tokens: bool = True) -> Self:
        """Create an input of one text chunk by encoding a text.

        Args:
            text: the text to encode.
            tokenizer: the result of a client's `get_tokenizer`, or another tokenizer with this `encode`.
            add_special_tokens: add the tokenizer's special tokens; set it to False for a chat rendered by a
                template, which already has them.


        >>> class Letters:
        ...     def encode(self, text, *, add_special_tokens):
        ...         return [ord(letter) for letter in text]
        >>> ModelInput.from_text("ab", Letters()).to_ints()
        [97, 98]
        """
        if not isinstance(text, str):
            raise InvalidInputError(f"text: expected one text, got a {type(text).__name__}")
        given: Any = tokenizer
        if isinstance(given, str):
            raise InvalidInputError(
                f"tokenizer: expected a tokenizer, got {given!r}; give get_tokenizer({given!r})"
            )
        return cls.from_ints(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    @classmethod
    def from_chat(
        cls, messages: Sequence[Mapping[str, Any]], tokenizer: RendersChats, **options: Any
    ) -> Self:
        """Create an input of one text chunk from a chat, ready for the assistant's next turn.

        Args:
            messages: dictionaries with `role` and `content`.
            tokenizer: the result of a client's `get_tokenizer`, or another tokenizer with this
                `apply_chat_template`. Those of this package need the extra `chat`.
            options: further arguments of `apply_chat_template`, such as `tools`, `chat_template`,
                `add_generation_prompt=False` and variables of the template.

        Raises:
            InvalidInputError: the messages are not a chat, or the template refuses them.

        >>> import tinker_sync
        >>> tokenizer = tinker_sync.get_tokenizer("tinker-sync/tiny")
        >>> prompt = ModelInput.from_chat([{"role": "user", "content": "2 + 3?"}], tokenizer)
        >>> tokenizer.decode(prompt.to_ints())
        '<|im_start|>user\\n2 + 3?<|im_end|>\\n<|im_start|>assistant\\n'
        """
        _chat.refuse_odd_messages(messages)
        settled = {"add_generation_prompt": True, **options, "tokenize": True, "return_dict": False}
        return cls.from_ints(tokenizer.apply_chat_template(messages, **settled))

    @classmethod
    def empty(cls) -> Self:
        """Create an input without chunks.

        >>> ModelInput.empty().length
        0
        """
        return cls(chunks=[])

    def to_ints(self) -> list[int]:
        """Return all token ids as one list. Raises `InvalidInputError` for chunks other than text.

        >>> ModelInput.from_ints((5, 6)).to_ints()
        [5, 6]
        """
        tokens: list[int] = []
        for index, chunk in enumerate(self.chunks):
            if not isinstance(chunk, EncodedTextChunk):
                raise InvalidInputError(
                    f"ModelInput.to_ints: chunks[{index}] is a {type(chunk).__name__}, which has no token ids"
                )
            tokens += chunk.listed()
        return tokens

    @property
    def length(self) -> int:
        """The length in tokens. Raises `InvalidInputError` for an image without `expected_tokens`."""
        return sum(chunk.length for chunk in self.chunks)

    def append(self, chunk: ModelInputChunk) -> Self:
        """Return a new input with one more chunk.

        >>> ModelInput.empty().append(EncodedTextChunk(tokens=[1])).length
        1
        """
        return type(self)(chunks=[*self.chunks, chunk])

    def append_int(self, token: int) -> Self:
        """Return a new input with one more token, in a separate chunk.

        >>> len(ModelInput.from_ints([1]).append_int(2).chunks)
        2
        """
        return self.append(EncodedTextChunk(tokens=[token]))

    def _problems(self) -> Iterator[str]:
        """Yield a problem for each chunk with a negative token id, with its place in the input in front."""
        for index, chunk in enumerate(self.chunks):
            if isinstance(chunk, EncodedTextChunk) and chunk._has_negative():
                least = min(chunk.tokens)
                place = list(chunk.tokens).index(least)
                yield f".chunks[{index}].tokens[{place}]: expected 0 or more, got {least}"

    def known_length(self) -> int | None:
        """Return the length if all chunks are text, else None.

        >>> ModelInput(chunks=[ImageChunk(data=b"", format="png")]).known_length() is None
        True
        """
        total = 0
        for chunk in self.chunks:
            # The server alone decides the length of other chunks; `expected_tokens` is advice.
            if not isinstance(chunk, EncodedTextChunk):
                return None
            total += chunk.length
        return total

    def __hash__(self) -> int:
        return hash(tuple(self.chunks))


_CONSTANT_TENSOR = 254
_LAST_DTYPE = 7
_MAX_VARINT_BITS = 63


def _container_shape(container: bytes) -> tuple[int, ...]:
    """Read the shape from a tensor container's header: marker, dtype, number of dimensions, varints."""
    octets = iter(container)
    kind = _next_octet(octets)
    if kind == _CONSTANT_TENSOR:
        kind = _next_octet(octets)
    if kind > _LAST_DTYPE:
        raise InvalidInputError(f"DmelChunk.dmel: unknown dtype {kind} in the tensor header")
    dimensions = _next_varint(octets)
    if dimensions == 0:
        raise InvalidInputError("DmelChunk.dmel: the tensor has no dimensions")
    return tuple(_next_varint(octets) for _ in range(dimensions))


def _next_octet(octets: Iterator[int]) -> int:
    octet = next(octets, None)
    if octet is None:
        raise InvalidInputError("DmelChunk.dmel: the tensor header is cut short")
    return octet


def _next_varint(octets: Iterator[int]) -> int:
    value = 0
    for shift in range(0, _MAX_VARINT_BITS + 1, 7):
        octet = _next_octet(octets)
        value |= (octet & 0x7F) << shift
        if octet < 0x80 and value < 2**_MAX_VARINT_BITS:
            return value
    raise InvalidInputError("DmelChunk.dmel: a number in the tensor header is too large")
