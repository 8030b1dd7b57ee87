"""The input of a model: chunks of tokens, images and audio, and `ModelInput`, a list of chunks.

The last parts check the messages of chats, and read the headers of images and sounds without decoding them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import attrs

from tinker_sync._base.numpy import AnyArray, Int32Array, np
from tinker_sync.errors import InvalidInputError
from tinker_sync.types._arrays import (
    ArrayHead,
    check_tokens,
    least_of,
    pack_int32,
    quick_hash,
    same_values,
    tokens_as_int32,
    unpack_int32,
)
from tinker_sync.types._model import Model, model
from tinker_sync.types._structured import refuse

if TYPE_CHECKING:
    from typing import TypeAlias

    from typing_extensions import Self
from typing import Final, NamedTuple

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
        refuse_odd_messages(messages)
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

    def _estimate_bytes(self, token_bytes: int) -> int:
        """Return the size to which the limits of servers refer, with `token_bytes` for each token of text.

        It is computed without encoding the input. Field names and framing do not count.
        """
        size_bytes = 0
        for chunk in self.chunks:
            if isinstance(chunk, EncodedTextChunk):
                size_bytes += token_bytes * chunk.length
            elif isinstance(chunk, ImageChunk):
                size_bytes += len(chunk.data)
            elif isinstance(chunk, DmelChunk):
                size_bytes += len(chunk.dmel)
            else:
                size_bytes += len(chunk.location)
        return size_bytes

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


# ------------------------------------------------------------------------ headers of images and sounds

_PNG: Final = b"\x89PNG\r\n\x1a\n"
_JPEG: Final = b"\xff\xd8\xff"
_JPEG_END: Final = b"\xff\xd9"
_OTHERS: Final = {b"GIF8": "GIF", b"RIFF": "WebP", b"BM": "BMP", b"II*\0": "TIFF", b"MM\0*": "TIFF"}
_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""The JPEG segments with the image size; the three excluded markers are tables."""
_BARE: Final = frozenset([0x01, *range(0xD0, 0xD9)])
"""JPEG markers without a length."""
_SCAN: Final = 0xDA


class Picture(NamedTuple):
    """The format and the size that an image's header states."""

    format: Literal["png", "jpeg"]
    width: int
    height: int


def inspect_image(data: bytes, where: str) -> Picture:
    """Read format and size of a complete PNG or JPEG file.

    Args:
        data: the file's bytes.
        where: the name of the data in error messages.

    Raises:
        InvalidInputError: the file is of another format, damaged, truncated or without pixels.
    """
    if data.startswith(_PNG):
        found = _read_png(data)
    elif data.startswith(_JPEG):
        found = _read_jpeg(data)
    else:
        other = next((name for begin, name in _OTHERS.items() if data.startswith(begin)), "something else")
        raise InvalidInputError(f"{where}: expected a PNG or JPEG file, got {other if data else 'nothing'}")
    if found is None:
        raise InvalidInputError(f"{where}: the image file is damaged or cut short")
    if not (found.width and found.height):
        raise InvalidInputError(f"{where}: the image is {found.width} x {found.height} pixels")
    return found


def _read_png(data: bytes) -> Picture | None:
    found: Picture | None = None
    for kind, start, length in _png_chunks(data):
        if found is None:
            if kind != b"IHDR" or length != 13:
                return None
            found = Picture("png", _read_number(data, start, 4), _read_number(data, start + 4, 4))
        if kind == b"IEND":
            return found
    return None


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Yield the kind of each PNG chunk, and the position and the length of the chunk's data.

    The data of the last chunk may be incomplete, if the file is truncated.
    """
    at = len(_PNG)
    while at + 12 <= len(data):
        length = _read_number(data, at, 4)
        yield data[at + 4 : at + 8], at + 8, length
        at += 12 + length


def _read_jpeg(data: bytes) -> Picture | None:
    found: Picture | None = None
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # padding
            at += 1
            continue
        if marker in _BARE:
            at += 2
            continue
        length = _read_number(data, at + 2, 2)
        if marker in _FRAMES and at + 9 <= len(data):
            found = Picture("jpeg", _read_number(data, at + 7, 2), _read_number(data, at + 5, 2))
        if marker == _SCAN:
            return found if data.find(_JPEG_END, at + 2 + length) >= 0 else None
        at += 2 + max(length, 2)
    return None


def _read_number(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[at : at + size], "big")


# ----------------------------------------------------------------------------------------------- audio

_CONSTANT_TENSOR: Final = 254
_LAST_DTYPE: Final = 7
_MAX_VARINT_BITS: Final = 63


def read_container_shape(container: bytes) -> tuple[int, ...]:
    """Return the shape that the header of a serialized tensor states.

    The header has an optional marker, the dtype, the number of dimensions and the size of each dimension.

    Raises:
        InvalidInputError: the header is damaged or cut short, or the tensor has no dimensions.
    """
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


# ----------------------------------------------------------------------------------------------- chats

_OTHER_FORMATS: Final = {"from": "role", "value": "content", "speaker": "role", "text": "content"}
"""Keys of other chat formats, each with the key to use instead."""


def refuse_odd_messages(messages: Any) -> None:
    """Raise an error unless the value is a sequence of one or more chat messages, each with a role.

    For a message in another chat format, the error lists the keys to rename.

    Raises:
        InvalidInputError: `problems` lists each message that is wrong.

    >>> refuse_odd_messages([{"from": "human", "value": "2 + 3?"}])
    Traceback (most recent call last):
    tinker_sync.errors.InvalidInputError: messages[0]: has no 'role'; rename 'from' to 'role', 'value' to \
'content', and 'human' to 'user'
    """
    if isinstance(messages, Mapping):
        held = next((name for name, value in messages.items() if isinstance(value, list)), None)
        if "role" in messages or held is None:
            raise InvalidInputError("messages: expected a list of messages, got one; write [message]")
        raise InvalidInputError(f"messages: expected a list, got a dictionary; give its {held!r}")
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        kind = type(messages).__name__
        raise InvalidInputError(
            f"messages: expected a list of dictionaries with role and content, got {kind}"
        )
    problems = [problem for index, message in enumerate(messages) for problem in _problems(index, message)]
    if not messages:
        problems = ["messages: is empty"]
    if problems:
        raise InvalidInputError(problems)


def _problems(index: int, message: Any) -> Iterator[str]:
    if not isinstance(message, Mapping):
        # Objects of other libraries have the keys as attributes.
        if not hasattr(message, "role"):
            kind = type(message).__name__
            yield f"messages[{index}]: expected a dictionary with role and content, got a {kind}"
        return
    if "role" not in message:
        yield f"messages[{index}]: has no 'role'{_advice(message)}"
    elif not isinstance(message["role"], str):
        yield f"messages[{index}]['role']: expected text, got {message['role']!r}"
    elif "content" not in message and "value" in message:
        yield f"messages[{index}]: has no 'content'{_advice(message)}"
    elif all(value is None for name, value in message.items() if name not in ("role", "name")):
        found = "is None" if "content" in message else "is missing"
        yield f"messages[{index}]['content']: {found}; give text, or leave the message out"
    elif isinstance(message.get("content"), (int, float, bytes)):
        given = message["content"]
        yield f"messages[{index}]['content']: expected text, got {given!r} ({type(given).__name__})"


def _advice(message: Mapping[str, Any]) -> str:
    renames = [f"{old!r} to {new!r}" for old, new in _OTHER_FORMATS.items() if old in message]
    if not renames:
        return "; a message is {'role': 'user', 'content': '...'}"
    roles = {"human": "user", "gpt": "assistant", "bot": "assistant"}
    given = message.get("from", message.get("speaker"))
    if given in roles:
        renames.append(f"{given!r} to {roles[given]!r}")
    listed = ", ".join(renames[:-1]) + f", and {renames[-1]}" if len(renames) > 2 else " and ".join(renames)
    return f"; rename {listed}"


def length_of(model_input: ModelInput) -> int:
    """Return the number of tokens of an input.

    An image counts as the tokens it is expected to take. An image without that number counts as 0, because
    only the server can compute it.

    >>> length_of(ModelInput.from_ints([1, 2, 3]))
    3
    """
    length = model_input.known_length()
    return sum(map(_length, model_input.chunks)) if length is None else length


def _length(chunk: ModelInputChunk) -> int:
    try:
        return chunk.length
    except ValueError:
        return 0
