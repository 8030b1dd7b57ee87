"""`Tokenizer`: text to token ids and back, with what scripts expect of it, without a framework."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from tinker_sync.errors import InvalidInputError, TokenizerError
from tinker_sync.runtime import _fork
from tinker_sync.text.encoded import Encoded, as_ids, as_tensors
from tinker_sync.text.hub import TOKENIZER_FILE
from tinker_sync.text.lengths import Lengths
from tinker_sync.text.setup import Setup, Templates, read_setup
from tinker_sync.text.special import SpecialTokens

if TYPE_CHECKING:
    from tinker_sync.text.chat import Chat, Message, Tool

_COLUMNS: Final = {
    "input_ids": "ids",
    "token_type_ids": "type_ids",
    "attention_mask": "attention_mask",
    "special_tokens_mask": "special_tokens_mask",
    "offset_mapping": "offsets",
}


class Tokenizer(SpecialTokens):
    """Turns text into the token ids of a model and back. Threads may share it, and forked children use it.

    Gives what `transformers` gives for the same files, without loading it. Clients give theirs by
    `get_tokenizer`, and `from_directory` reads one from files:

    >>> from tokenizers import Tokenizer as Backend, models
    >>> tokenizer = Tokenizer(Backend(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")))
    >>> tokenizer.encode("a"), tokenizer.decode([0, 1]), len(tokenizer)
    ([0], 'a b', 3)
    """

    is_fast: Final = True

    def __init__(self, backend: Backend, setup: Setup | None = None, *, name_or_path: str = "") -> None:
        setup = setup if setup is not None else read_setup(None, backend)
        # Here only, before anybody else has it: no call changes the backend, so that threads may share it.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = setup.split_special_tokens
        if setup.added:
            backend.add_tokens(setup.added)
        super().__init__(backend, setup.named, setup.extra)
        self._setup = setup
        self.chat_template: Templates = setup.templates
        self.name_or_path = name_or_path
        self.model_max_length = setup.model_max_length
        self.model_input_names = setup.model_input_names
        self.padding_side = setup.padding_side
        self.truncation_side = setup.truncation_side
        # Made for vocabularies of words; in byte pairs it would eat spaces that were there.
        harmless = setup.clean_up_bpe_too or type(backend.model).__name__ != "BPE"
        self.clean_up_tokenization_spaces = setup.clean_up_spaces and harmless

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str], *, name_or_path: str = "") -> Tokenizer:
        """The tokenizer whose `tokenizer.json` and other files lie in a directory.

        Raises:
            TokenizerError: there is none, or it cannot be read.
        """
        path = Path(directory)
        try:
            backend = Backend.from_file(str(path / TOKENIZER_FILE))
        except Exception as error:  # the library raises the bare class
            reason = f"{path / TOKENIZER_FILE} cannot be read: {error}"
            raise TokenizerError(reason, name_or_path or str(path)) from error
        return cls(backend, read_setup(path, backend), name_or_path=name_or_path or str(path))

    # -------------------------------------------------------------------------------------- text to ids

    def encode(
        self,
        text: str | Sequence[str],
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        **options: Any,
    ) -> Any:
        """The token ids of a text, as a list; of several texts, a list of lists.

        Args:
            text: what to encode.
            text_pair: a second part, where a model takes two.
            add_special_tokens: put around it what the tokenizer puts around every text.
            options: as in a call of the tokenizer, such as `return_tensors="np"`.

        Raises:
            InvalidInputError: it is no text.
        """
        if isinstance(text, str) and not options:
            pairs = None if text_pair is None else [text_pair]
            return self._encode_all([text], pairs, add_special_tokens)[0].ids
        return self(text, text_pair, add_special_tokens=add_special_tokens, **options)["input_ids"]

    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: str | Sequence[str] | None = None,
        *,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_attention_mask: bool | None = None,
        return_token_type_ids: bool | None = None,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
    ) -> Encoded:
        """Encode a text or several: ids, attention mask and what else is asked for.

        Args:
            text: one text, or a list of them.
            text_pair: a second part for each.
            add_special_tokens: put around each what the tokenizer puts around every text.
            padding: True or "longest" pads to the longest, "max_length" to `max_length`.
            truncation: True cuts what is longer than `max_length`, special tokens counted.
            max_length: for the two; None takes the model's own limit.
            pad_to_multiple_of: round the padded length up.
            padding_side: "left" or "right" in place of the tokenizer's own.
            return_tensors: "np" or "pt" gives arrays or tensors with one row for each text.
            return_attention_mask, return_token_type_ids: None: where the model takes them.
            return_special_tokens_mask, return_offsets_mapping, return_length: further columns.

        Raises:
            InvalidInputError: it is no text, or it cannot be cut or padded.
        """
        single = isinstance(text, str)
        if not isinstance(text, Iterable):
            raise InvalidInputError(f"text: expected a str or a list of them, got {type(text).__name__}")
        texts = [text] if isinstance(text, str) else list(text)
        pairs = [text_pair] if isinstance(text_pair, str) else text_pair
        if pairs is not None and len(pairs) != len(texts):
            raise InvalidInputError(f"text_pair: expected {len(texts)}, one for each text, got {len(pairs)}")
        lengths = Lengths.of(padding, truncation, max_length, pad_to_multiple_of, self.model_max_length)
        encodings = self._encode_all(texts, pairs, add_special_tokens)
        if lengths.longest is not None and any(len(each) > lengths.longest for each in encodings):
            encodings = self._encode_cut(texts, pairs, lengths.longest, add_special_tokens)
        self._pad(encodings, lengths, padding_side or self.padding_side)
        asked = {"token_type_ids": return_token_type_ids, "attention_mask": return_attention_mask}
        columns = {
            name: name in self.model_input_names if want is None else want for name, want in asked.items()
        }
        columns |= {
            "special_tokens_mask": return_special_tokens_mask,
            "offset_mapping": return_offsets_mapping,
        }
        return _columns(
            encodings,
            ["input_ids", *(name for name, want in columns.items() if want)],
            lengths_too=return_length,
            single=single,
            kind=return_tensors,
        )

    def tokenize(self, text: str, pair: str | None = None, add_special_tokens: bool = False) -> list[str]:
        """The tokens of a text as the vocabulary writes them."""
        pairs = None if pair is None else [pair]
        return self._encode_all([text], pairs, add_special_tokens)[0].tokens

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """How many tokens are put around a text, or around two."""
        return self._backend.num_special_tokens_to_add(pair)

    def _encode_all(
        self, texts: Sequence[str], pairs: Sequence[str] | None, add_special_tokens: bool
    ) -> list[Encoding]:
        try:
            if len(texts) == 1:
                pair = pairs[0] if pairs is not None else None
                return [self._backend.encode(texts[0], pair, add_special_tokens=add_special_tokens)]
            if _fork.generation():
                # The library's threads stayed in the parent, and where told to it would wait for them.
                partners: Sequence[str | None] = [None] * len(texts) if pairs is None else pairs
                return [
                    self._backend.encode(*both, add_special_tokens=add_special_tokens)
                    for both in zip(texts, partners, strict=True)
                ]
            inputs = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
            return self._backend.encode_batch(inputs, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidInputError(_not_text([*texts, *(pairs or ())], error)) from error

    def _encode_cut(
        self, texts: Sequence[str], pairs: Sequence[str] | None, longest: int, add_special_tokens: bool
    ) -> list[Encoding]:
        """The texts cut before special tokens are put around them, so that these are never lost."""
        if pairs is not None:
            raise InvalidInputError("truncation: pairs of texts cannot be cut; cut one of the two before")
        room = longest - (self.num_special_tokens_to_add() if add_special_tokens else 0)
        if room < 0:
            raise InvalidInputError(f"max_length: {longest} is less than the special tokens take")
        encodings = self._encode_all(texts, None, False)
        for each in encodings:
            each.truncate(room, direction=self.truncation_side)
        return [self._backend.post_process(each, None, add_special_tokens) for each in encodings]

    def _pad(self, encodings: Sequence[Encoding], lengths: Lengths, side: str) -> None:
        target = lengths.target([len(each) for each in encodings])
        if target is None:
            return
        token, index = self.pad_token, self.pad_token_id
        if token is None or index is None:
            advice = "tokenizer.pad_token = tokenizer.eos_token sets one"
            raise InvalidInputError(f"padding: the tokenizer has no padding token; {advice}")
        for each in encodings:
            each.pad(target, direction=side, pad_id=index, pad_token=token)

    # -------------------------------------------------------------------------------------- ids to text

    @overload
    def decode(
        self,
        token_ids: int | Sequence[int],
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool | None = ...,
    ) -> str: ...
    @overload
    def decode(
        self,
        token_ids: Sequence[Sequence[int]],
        skip_special_tokens: bool = ...,
        clean_up_tokenization_spaces: bool | None = ...,
    ) -> list[str]: ...
    @overload
    def decode(
        self, token_ids: Any, skip_special_tokens: bool = ..., clean_up_tokenization_spaces: bool | None = ...
    ) -> Any: ...
    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> Any:
        """The text of token ids; of several rows of them a list of texts.

        Args:
            token_ids: an id, a list, range, numpy array or torch tensor of ids, or rows of them.
            skip_special_tokens: leave special tokens out.
            clean_up_tokenization_spaces: take away spaces before marks; None: as the model's files say.

        Raises:
            InvalidInputError: an id is negative, too large or no whole number.
        """
        ids = as_ids(token_ids)
        if isinstance(ids, int):
            ids = [ids]
        if ids and isinstance(ids[0], (list, tuple)):
            return [self._decode(row, skip_special_tokens, clean_up_tokenization_spaces) for row in ids]
        return self._decode(ids, skip_special_tokens, clean_up_tokenization_spaces)

    def batch_decode(
        self,
        sequences: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]:
        """The texts of several rows of ids. Arguments as in `decode`."""
        rows = map(_row, as_ids(sequences))
        return [self._decode(row, skip_special_tokens, clean_up_tokenization_spaces) for row in rows]

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool, clean_up: bool | None) -> str:
        try:
            text = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise InvalidInputError(f"decode: expected token ids of 0 or more ({error})") from error
        clean_up = self.clean_up_tokenization_spaces if clean_up is None else clean_up
        return self.clean_up_tokenization(text) if clean_up else text

    @staticmethod
    def clean_up_tokenization(text: str) -> str:
        """Without the spaces that decoding by words leaves before marks and English endings.

        >>> Tokenizer.clean_up_tokenization("it 's done .")
        "it's done."
        """
        for found, wanted in _TIDIER.items():
            text = text.replace(found, wanted)
        return text

    # -------------------------------------------------------------------------------------- the vocabulary

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        """The id of a token, or of each; of an unknown one that of `unk_token`, or None."""
        if isinstance(tokens, str):
            index = self._backend.token_to_id(tokens)
            return self.unk_token_id if index is None else index
        return [self.convert_tokens_to_ids(token) for token in tokens]

    @overload
    def convert_ids_to_tokens(self, ids: int, skip_special_tokens: bool = False) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> list[str | None]: ...
    def convert_ids_to_tokens(
        self, ids: Any, skip_special_tokens: bool = False
    ) -> str | list[str | None] | None:
        """The token of an id, or of each, as the vocabulary writes it; None where there is none."""
        plain = as_ids(ids)
        if isinstance(plain, int):
            return self._backend.id_to_token(plain)
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        return [self._backend.id_to_token(index) for index in plain if index not in skipped]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Tokens joined to text as decoding joins them."""
        decoder = self._backend.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))

    @property
    def vocab_size(self) -> int:
        """How many tokens there are without the added ones."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def get_vocab(self) -> dict[str, int]:
        """Every token and its id; a new dictionary each time."""
        return self._backend.get_vocab(with_added_tokens=True)

    vocab = property(get_vocab)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Tokens added to the vocabulary, by id."""
        return self._backend.get_added_tokens_decoder()

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        """The ids of tokens added to the vocabulary."""
        return {token.content: index for index, token in sorted(self.added_tokens_decoder.items())}

    def get_added_vocab(self) -> dict[str, int]:
        """The ids of tokens added to the vocabulary."""
        return self.added_tokens_encoder

    # -------------------------------------------------------------------------------------- chats

    def get_chat_template(self, chat_template: str | None = None, tools: Sequence[Tool] | None = None) -> str:
        """The template a chat is rendered with: a named one, the given text, or the model's own.

        Raises:
            InvalidInputError: the model has none, or several and none is the default.
        """
        return self._chat().template(chat_template, tools)

    def apply_chat_template(
        self,
        conversation: Sequence[Message] | Sequence[Sequence[Message]],
        tools: Sequence[Tool] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool | str = False,
        tokenize: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> Any:
        """Render a chat as the model has learned to read it, as text or as token ids. Needs the extra `chat`.

        Args:
            conversation: messages, dictionaries with `role`, `content` and the like; or several such lists.
            tools: what the model may call: JSON schemas, or functions with types and a docstring.
            documents: what the model may cite, for templates that know of it.
            chat_template: another template, or the name of one of the model's.
            add_generation_prompt: end with what begins the assistant's turn.
            continue_final_message: leave the last message open, to be continued.
            tokenize: give ids; False gives the text.
            padding, truncation, max_length, return_tensors: as in a call of the tokenizer.
            return_dict: give `input_ids` and `attention_mask` by name; False gives the ids alone.
            return_assistant_tokens_mask: add `assistant_masks`, if the template marks those words.
            tokenizer_kwargs: further options of that call.
            variables: whatever else the template reads.

        Raises:
            InvalidInputError: there is no template, or it refuses the chat.
            MissingExtraError: Jinja is not installed.
        """
        options = {
            "padding": padding,
            "truncation": truncation,
            "max_length": max_length,
            "return_tensors": return_tensors,
            **(tokenizer_kwargs or {}),
        }
        return self._chat().apply(
            conversation,
            template=chat_template,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
            tokenize=tokenize,
            return_dict=return_dict,
            masks=return_assistant_tokens_mask,
            options=options,
        )

    def _chat(self) -> Chat:
        from tinker_sync.text.chat import Chat  # here: most scripts load a tokenizer, and render no chats

        return Chat(self)

    # -------------------------------------------------------------------------------------- keeping it

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> tuple[str, ...]:
        """Write the files from which this or another library loads the same tokenizer; gives their paths."""
        from tinker_sync.text import saving  # rarely needed, as above

        return saving.save(Path(save_directory), self._backend, self._setup.config, self)

    def __repr__(self) -> str:
        return f"<Tokenizer {self.name_or_path or type(self._backend.model).__name__}, {len(self)} tokens>"


_TIDIER: Final = {
    " .": ".",
    " ?": "?",
    " !": "!",
    " ,": ",",
    " ' ": "'",
    " n't": "n't",
    " 'm": "'m",
    " 's": "'s",
    " 've": "'ve",
    " 're": "'re",
}


def _row(ids: Any) -> Sequence[int]:
    return [ids] if isinstance(ids, int) else ids


def _columns(
    encodings: Sequence[Encoding], names: Sequence[str], *, lengths_too: bool, single: bool, kind: str | None
) -> Encoded:
    made = Encoded({name: [getattr(each, _COLUMNS[name]) for each in encodings] for name in names})
    if kind is not None:
        made = Encoded({name: as_tensors(rows, kind, name) for name, rows in made.items()})
    elif single:
        made = Encoded({name: rows[0] for name, rows in made.items()})
    if lengths_too:
        made["length"] = [len(each) for each in encodings]
    made.encodings = encodings
    return made


def _not_text(given: Sequence[object], error: Exception) -> str:
    for index, text in enumerate(given):
        where = "text" if len(given) == 1 else f"text[{index}]"
        if not isinstance(text, str):
            return f"{where}: expected a str, got {type(text).__name__}"
        try:
            text.encode()
        except UnicodeEncodeError as broken:
            return f"{where}[{broken.start}]: half of a surrogate pair is no character"
    return f"text: {error}"
