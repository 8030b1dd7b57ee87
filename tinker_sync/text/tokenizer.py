"""`Tokenizer`: conversion of text to token ids and back. Any thread may use one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, overload

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as Backend

from tinker_sync.errors import InvalidInputError, TokenizerError
from tinker_sync.runtime import _fork
from tinker_sync.text.encoded import Encoded, Lengths, as_ids, describe_bad_text, make_columns
from tinker_sync.text.hub import TOKENIZER_FILE
from tinker_sync.text.setup import Setup, SpecialTokens, Templates, read_setup, save

if TYPE_CHECKING:
    from tinker_sync.text.chat import Chat, Message, Tool


class Tokenizer(SpecialTokens):
    """A converter of text to the token ids of a model and back. Threads may share it, also after a fork.
    The results equal those of `transformers` for the same files. `get_tokenizer` of a client returns the
    tokenizer of its model, and `from_directory` reads one from files:

    >>> from tokenizers import Tokenizer as Backend, models
    >>> tokenizer = Tokenizer(Backend(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")))
    >>> tokenizer.encode("a"), tokenizer.decode([0, 1]), len(tokenizer)
    ([0], 'a b', 3)
    """

    is_fast: Final = True

    def __init__(self, backend: Backend, setup: Setup | None = None, *, name_or_path: str = "") -> None:
        setup = setup if setup is not None else read_setup(None, backend)
        # Threads share the backend, so its settings change only here, before the tokenizer is shared.
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
        # The clean-up is made for vocabularies of words. With byte pairs it would remove spaces of the text.
        harmless = setup.clean_up_bpe_too or type(backend.model).__name__ != "BPE"
        self.clean_up_tokenization_spaces = setup.clean_up_spaces and harmless

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str], *, name_or_path: str = "") -> Tokenizer:
        """Load the tokenizer from a directory with `tokenizer.json` and the other files.

        Raises:
            TokenizerError: there is no tokenizer, or it cannot be read.
        """
        path = Path(directory)
        try:
            backend = Backend.from_file(str(path / TOKENIZER_FILE))
        except Exception as error:  # the library raises the bare class
            reason = f"{path / TOKENIZER_FILE} cannot be read: {error}"
            raise TokenizerError(reason, name_or_path or str(path)) from error
        return cls(backend, read_setup(path, backend), name_or_path=name_or_path or str(path))

    def encode(
        self,
        text: str | Sequence[str],
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        **options: Any,
    ) -> Any:
        """Return the token ids of a text as a list, or those of several texts as a list of lists.

        Args:
            text: one text, or a list of them.
            text_pair: a second part, for models that take two.
            add_special_tokens: add the special tokens that frame every text.
            options: as in a call of the tokenizer, such as `return_tensors="np"`.

        Raises:
            InvalidInputError: the argument is not a text.
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
        """Encode one text or several, and return ids, attention mask and further columns.

        Args:
            text: one text, or a list of them.
            text_pair: a second part for each.
            add_special_tokens: add the special tokens that frame every text.
            padding: True or "longest" pads to the longest text, "max_length" to `max_length`.
            truncation: True cuts texts to `max_length` tokens; the special tokens count.
            max_length: for padding and truncation; None takes the model's own limit, if it has one.
            pad_to_multiple_of: round the padded length up to a multiple of this number.
            padding_side: "left" or "right" in place of the tokenizer's own side.
            return_tensors: "np" returns arrays, "pt" tensors of torch, with one row for each text.
            return_attention_mask, return_token_type_ids: None includes them if the model takes them.
            return_special_tokens_mask, return_offsets_mapping, return_length: add these columns.

        Raises:
            InvalidInputError: an argument is invalid, a text cannot be cut or padded, or a pair is too long.
        """
        single, given = isinstance(text, str), cast("Any", text)
        if isinstance(given, (bytes, bytearray)):
            raise InvalidInputError(f"text: expected a str, got {type(given).__name__}; give text.decode()")
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
        return make_columns(
            encodings,
            ["input_ids", *(name for name, want in columns.items() if want)],
            lengths_too=return_length,
            single=single,
            kind=return_tensors,
        )

    def tokenize(self, text: str, pair: str | None = None, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text as the vocabulary spells them."""
        pairs = None if pair is None else [pair]
        return self._encode_all([text], pairs, add_special_tokens)[0].tokens

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Return the number of special tokens that frame a text, or a pair of texts."""
        return self._backend.num_special_tokens_to_add(pair)

    def _encode_all(
        self, texts: Sequence[str], pairs: Sequence[str] | None, add_special_tokens: bool
    ) -> list[Encoding]:
        try:
            if len(texts) == 1:
                pair = pairs[0] if pairs is not None else None
                return [self._backend.encode(texts[0], pair, add_special_tokens=add_special_tokens)]
            if _fork.generation():
                # The library's worker threads exist in the parent only; a batch here could wait for them.
                partners: Sequence[str | None] = [None] * len(texts) if pairs is None else pairs
                return [
                    self._backend.encode(*both, add_special_tokens=add_special_tokens)
                    for both in zip(texts, partners, strict=True)
                ]
            inputs = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
            return self._backend.encode_batch(inputs, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidInputError(describe_bad_text([*texts, *(pairs or ())], error)) from error

    def _encode_cut(
        self, texts: Sequence[str], pairs: Sequence[str] | None, longest: int, add_special_tokens: bool
    ) -> list[Encoding]:
        """Encode texts, and cut them before the special tokens are added, so that these are never cut off."""
        if pairs is not None:
            raise InvalidInputError("truncation: pairs of texts cannot be cut; shorten one of the two first")
        room = longest - (self.num_special_tokens_to_add() if add_special_tokens else 0)
        if room < 0:
            raise InvalidInputError(f"max_length: {longest} is less than the number of special tokens")
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
        """Return the text of token ids, or a list of texts for rows of ids.

        Args:
            token_ids: an id, a list, range, numpy array or torch tensor of ids, or rows of them.
            skip_special_tokens: leave special tokens out.
            clean_up_tokenization_spaces: remove spaces before punctuation; None follows the model's files.

        Raises:
            InvalidInputError: an id is negative, 2**32 or more, or not an integer. Unknown ids add no text.
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
        """Return the texts of several rows of ids. The arguments are those of `decode`."""
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
        """Remove the spaces that decoding by words leaves before punctuation and English endings.

        >>> Tokenizer.clean_up_tokenization("it 's done .")
        "it's done."
        """
        for found, wanted in _TIDIER.items():
            text = text.replace(found, wanted)
        return text

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        """Return the id of a token, or of each token in a list.
        For an unknown token, return the id of `unk_token`, or None if the model has no such token.
        """
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
        """Return the token of an id, or of each id in a list, as the vocabulary spells it; None if unknown.
        `skip_special_tokens` omits special tokens from a list. Negative ids raise `InvalidInputError`.
        """
        plain = as_ids(ids)
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        try:
            if isinstance(plain, int):
                return self._backend.id_to_token(plain)
            return [self._backend.id_to_token(index) for index in plain if index not in skipped]
        except (TypeError, OverflowError) as error:
            raise InvalidInputError(f"expected token ids of 0 or more ({error})") from error

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """Return the text of tokens, decoded like that of ids, but without any clean-up of spaces."""
        decoder = self._backend.decoder
        return " ".join(tokens) if decoder is None else decoder.decode(list(tokens))

    @property
    def vocab_size(self) -> int:
        """The number of tokens without the added ones."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def get_vocab(self) -> dict[str, int]:
        """Return every token and its id, in a new dictionary."""
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
        """Return the ids of tokens added to the vocabulary."""
        return self.added_tokens_encoder

    def get_chat_template(self, chat_template: str | None = None, tools: Sequence[Tool] | None = None) -> str:
        """Return the text of the template that `apply_chat_template` uses for these arguments.

        Args:
            chat_template: the name of a template of the model, or the text of a template. None chooses the
                model's own template; of several, it chooses `tool_use` for a chat with tools, else `default`.
            tools: the tools of the chat.

        Raises:
            InvalidInputError: the model has no template, or several without a default.
        """
        return self._chat().choose_template(chat_template, tools)

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
        """Render a chat with the model's template, as token ids or as text. Needs the extra `chat`.

        Args:
            conversation: a list of messages, each a dictionary with `role` and `content`; or several lists.
            tools: functions the model may call: JSON schemas, or Python functions with types and docstring.
            documents: texts the model may cite, for templates that support them.
            chat_template: another template, or the name of one of the model's.
            add_generation_prompt: end with the beginning of the assistant's turn.
            continue_final_message: leave the last message open, for the model to continue; a text names the
                key of the open part, in place of `content`.
            tokenize: return ids; False returns the text.
            padding, truncation, max_length, return_tensors: as in a call of the tokenizer.
            return_dict: return `input_ids` and `attention_mask` by name; False returns the ids alone.
            return_assistant_tokens_mask: add `assistant_masks`: 1 in `{% generation %}` blocks, else 0.
            tokenizer_kwargs: further options of a call of the tokenizer.
            variables: further variables of the template.

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
        from tinker_sync.text.chat import Chat  # here, because most scripts render no chats

        return Chat(self)

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> tuple[str, ...]:
        """Write files from which this package or `transformers` loads this tokenizer. Return their paths."""
        return save(Path(save_directory), self._backend, self._setup.config, self)

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
