"""Special tokens of a tokenizer as attributes, such as `eos_token` and `eos_token_id`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, overload

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tinker_sync.errors import InvalidInputError
from tinker_sync.text.setup import NAMED


class _TokenAttribute:
    """The descriptor of an attribute such as `eos_token`: the text of a special token, or None.

    The user may set the attribute to another token of the vocabulary, or to None.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, tokenizer: None, owner: type) -> _TokenAttribute: ...
    @overload
    def __get__(self, tokenizer: SpecialTokens, owner: type) -> str | None: ...
    def __get__(self, tokenizer: SpecialTokens | None, owner: type) -> _TokenAttribute | str | None:
        return self if tokenizer is None else tokenizer.special_tokens_map.get(self._name)

    def __set__(self, tokenizer: SpecialTokens, token: str | AddedToken | None) -> None:
        tokenizer.name_special_token(self._name, None if token is None else str(token))


class _IdAttribute:
    """The descriptor of an attribute such as `eos_token_id`: the id of a special token, or None.

    The user may set the attribute to the id of another token of the vocabulary, or to None.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name.removesuffix("_id")

    @overload
    def __get__(self, tokenizer: None, owner: type) -> _IdAttribute: ...
    @overload
    def __get__(self, tokenizer: SpecialTokens, owner: type) -> int | None: ...
    def __get__(self, tokenizer: SpecialTokens | None, owner: type) -> _IdAttribute | int | None:
        if tokenizer is None:
            return self
        token = tokenizer.special_tokens_map.get(self._name)
        return None if token is None else tokenizer.backend_tokenizer.token_to_id(token)

    def __set__(self, tokenizer: SpecialTokens, index: int | None) -> None:
        token = None if index is None else tokenizer.backend_tokenizer.id_to_token(index)
        if index is not None and token is None:
            raise InvalidInputError(f"{self._name}_id: {index} is not in the vocabulary")
        tokenizer.name_special_token(self._name, token)


class SpecialTokens:
    """The special tokens of a vocabulary. Threads may share it."""

    bos_token, bos_token_id = _TokenAttribute(), _IdAttribute()
    eos_token, eos_token_id = _TokenAttribute(), _IdAttribute()
    unk_token, unk_token_id = _TokenAttribute(), _IdAttribute()
    sep_token, sep_token_id = _TokenAttribute(), _IdAttribute()
    pad_token, pad_token_id = _TokenAttribute(), _IdAttribute()
    cls_token, cls_token_id = _TokenAttribute(), _IdAttribute()
    mask_token, mask_token_id = _TokenAttribute(), _IdAttribute()
    pad_token_type_id: Final = 0

    def __init__(self, backend: Backend, named: Mapping[str, str], extra: list[str]) -> None:
        self._backend = backend
        self._named = named  # replaced as a whole, never modified
        self._extra = extra

    @property
    def backend_tokenizer(self) -> Backend:
        """The library's tokenizer. Threads share it, so do not change its settings."""
        return self._backend

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Special tokens by name, the common ones first."""
        return dict(self._named)

    @property
    def extra_special_tokens(self) -> list[str]:
        """Special tokens without a name."""
        return list(self._extra)

    additional_special_tokens = extra_special_tokens

    @property
    def all_special_tokens(self) -> list[str]:
        """Every special token once."""
        return list(dict.fromkeys([*self._named.values(), *self._extra]))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens."""
        ids = map(self._backend.token_to_id, self.all_special_tokens)
        return [index for index in ids if index is not None]

    def name_special_token(self, name: str, token: str | None) -> None:
        """Give a token of the vocabulary a name such as "pad_token". None removes the name.

        Raises:
            InvalidInputError: the token is not in the vocabulary. The vocabulary of a model cannot grow.
        """
        if token is not None and self._backend.token_to_id(token) is None:
            raise InvalidInputError(f"{name}: {token!r} is not in the vocabulary, which is the model's")
        named: dict[str, str | None] = {**self._named, name: token}
        order = (*NAMED, *(other for other in named if other not in NAMED))
        self._named = {each: kept for each in order if (kept := named.get(each)) is not None}

    def __getattr__(self, name: str) -> Any:
        """Return a special token that only some models have, or its id: `image_token` or `image_token_id`."""
        named: Mapping[str, str] = self.__dict__.get("_named", {})
        if name in named:
            return named[name]
        if name.endswith("_id") and name[:-3] in named:
            return self._backend.token_to_id(named[name[:-3]])
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
