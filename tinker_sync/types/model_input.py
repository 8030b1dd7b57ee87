"""The input of a model: chunks of tokens, images and audio, and `ModelInput`, a list of chunks."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import attrs

from tinker_sync._base.numpy import AnyArray, Int32Array, np
from tinker_sync.errors import InvalidInputError
from tinker_sync.types import _chat
from tinker_sync.types._arrays import ArrayHead, least_of, quick_hash, same_values
from tinker_sync.types._media import inspect_image, read_container_shape
from tinker_sync.types._model import Model, model
from tinker_sync.types._structured import refuse
from tinker_sync.types._tokens import check_tokens, pack_int32, tokens_as_int32, unpack_int32

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
    """The part of a tokenizer that `ModelInput.from_text` uses."""

    def encode(self, text: str, *, add_special_tokens: bool) -> TokenSequence:
        """Return the token ids of a text."""


class RendersChats(Protocol):
    """The part of a tokenizer that `ModelInput.from_chat` uses."""

    # `*arguments`, because mypy matches `**options` alone with no method that names its options.
    def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
        """Return the token ids of a chat."""


_TOKENS = "EncodedTextChunk.tokens"


@model
class EncodedTextChunk(Model):
    """A chunk of text, as token ids. A given array of integers is kept without a copy; a list is copied.

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
        packed = pack_int32(tokens) if isinstance(tokens, list) else None
        put(self, "_packed", packed)
        if packed is None:
            put(self, "tokens", check_tokens(tokens, _TOKENS))
        if type != "encoded_text":
            raise refuse("EncodedTextChunk.type", "one of 'encoded_text'", type)
        put(self, "type", "encoded_text")

    if not TYPE_CHECKING:  # it would allow every name

        def __getattr__(self, name: str) -> Any:
            """Return the ids of a list, at the first reading of `tokens`."""
            if name != "tokens":
                raise AttributeError(name)
            tokens = unpack_int32(self._packed)
            object.__setattr__(self, "tokens", tokens)
            return tokens

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.tokens) if self._packed is None else len(self._packed) // 4

    def listed(self) -> list[int]:
        """Return the ids as a new list, which the chunk does not keep."""
        if self._packed is not None:
            return unpack_int32(self._packed)
        held: Any = self.tokens
        return held.tolist() if hasattr(held, "tolist") else [*held]

    def as_int32(self) -> Int32Array:
        """Return the ids as a contiguous int32 array. An array that already has this form is not copied."""
        if self._packed is not None:
            return np.frombuffer(self._packed, "<i4")
        tokens: Any = self.tokens
        if type(tokens) is np.ndarray and tokens.dtype == np.int32 and tokens.flags.c_contiguous:
            return cast("Int32Array", tokens)
        return tokens_as_int32(self.tokens, _TOKENS)

    def _repr_items(self) -> Iterable[tuple[str, Any]]:
        held: Any = self.tokens
        yield "tokens", ArrayHead(held) if hasattr(held, "flat") else held
        yield "type", self.type

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
    """The base class of `ImageChunk` and `ImageAssetPointerChunk`, whose length only the user can give."""

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
    """A chunk with the bytes of an image file. Text in place of the bytes is decoded as base64.

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
        """Create a chunk from an image file, as `from_bytes` does. The extension of the name is ignored.

        Raises `OSError` if the file cannot be read, and the errors of `from_bytes`.
        """
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
            InvalidInputError: `image` is not an image of Pillow or has no pixels, or the format is unknown.
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
        """The width and height in pixels. Raises `InvalidInputError` if `data` is no PNG or JPEG file."""
        picture = inspect_image(self.data, "ImageChunk.data")
        return picture.width, picture.height


@model
class ImageAssetPointerChunk(_Picture):
    """A chunk with the address of an image, which the server fetches. Protobuf requests cannot contain it.

    >>> ImageAssetPointerChunk(format="png", location="asset://cat", expected_tokens=64).length
    64
    """

    format: Literal["png", "jpeg"]
    location: str
    expected_tokens: int | None = None
    type: Literal["image_asset_pointer"] = "image_asset_pointer"


@model
class DmelChunk(Model):
    """A chunk of audio: a serialized tensor of discretised mel frames. Text is decoded as base64.

    >>> DmelChunk(dmel=bytes([0, 1, 12])).length
    12
    """

    dmel: bytes
    type: Literal["dmel"] = "dmel"

    @property
    def length(self) -> int:
        """The number of tokens: the tensor's first dimension.

        Raises `InvalidInputError` if the tensor's header is damaged.
        """
        return read_container_shape(self.dmel)[0]


ModelInputChunk: TypeAlias = EncodedTextChunk | ImageAssetPointerChunk | ImageChunk | DmelChunk
"""One piece of a prompt."""


@model
class ModelInput(Model):
    """A prompt, or the input of a training example: a list of chunks.

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
        """Create an input of one text chunk; a numpy array of integers is kept without a copy.

        >>> ModelInput.from_ints(np.arange(4)).length
        4
        """
        return cls(chunks=[EncodedTextChunk(tokens=tokens)])

    @classmethod
    def from_text(cls, text: str, tokenizer: Encodes, *, add_special_tokens: bool = True) -> Self:
        """Create an input of one text chunk: the tokens of a text.

        Args:
            text: the text to encode.
            tokenizer: the result of a client's `get_tokenizer`, or another tokenizer with this `encode`.
            add_special_tokens: add the tokenizer's special tokens; set it to False for a chat rendered by a
                template, which already has them.

        Raises:
            InvalidInputError: `text` is not a text, or `tokenizer` is only the name of one.

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
        """Create an input of one text chunk from a chat, up to the beginning of the assistant's next turn.

        Args:
            messages: dictionaries with `role` and `content`.
            tokenizer: the result of a client's `get_tokenizer`, or another tokenizer with this
                `apply_chat_template`. The tokenizers of this package need the extra `chat` for it.
            options: further arguments of `apply_chat_template`, such as `tools`, `chat_template`,
                `add_generation_prompt=False` and variables of the template. `tokenize` and `return_dict` have
                no effect.

        Raises:
            InvalidInputError: the messages are not a chat, or a tokenizer of this package refuses them.
            MissingExtraError: a tokenizer of this package finds no Jinja, which the extra `chat` installs.

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
        """The length in tokens.

        Raises `InvalidInputError` for an image without `expected_tokens`, and for damaged audio.
        """
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
        """Yield a text for each chunk with a negative token id. The text begins with the place of the id."""
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
