"""`Conversation`: a chat whose sampled answers stay the tokens that were sampled.

Text that is decoded and encoded again can become other tokens than those that were sampled, and the training
would be off-policy without an error. So the prompt of a turn is the prompt before it, the sampled tokens, and
the encoded text that the chat template puts after them. If the template rewrites earlier turns instead, for
example by leaving out their reasoning, the prompt is encoded anew, and the turns before it are a datum of
their own, because the model has seen two different contexts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from attrs import field, frozen

from tinker_sync.data.answers import read_answer
from tinker_sync.data.chat_template import Message, Tool
from tinker_sync.data.completion import Ids32, TokenIds, as_ids, as_numbers
from tinker_sync.data.samples import Advantages, find_problems, logprobs_of, tokens_of
from tinker_sync.errors import InvalidInputError
from tinker_sync.types import (
    Datum,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampledSequence,
)
from tinker_sync.types.model_input import refuse_odd_messages

_PROBE: Final = "Zq"
# Tokens that end a turn in which a tool is called; a finished chat ends with another one.
_ENDS_OF_CALLS: Final = ("<|eom_id|>", "<|call|>")


def _as_prompt(given: TokenIds) -> Ids32:
    # A conversation has made the array itself, and need not look through its tokens again.
    return given if isinstance(given, np.ndarray) and given.dtype == np.int32 else as_ids(given, "prompt")


@frozen(eq=False)
class Turn:
    """One sampled answer of a conversation, with the exact tokens of its prompt.

    >>> turn = Turn([1, 2], SampledSequence("stop", None, [3], [-0.5]))
    >>> turn.row.tolist()
    [1, 2, 3]
    """

    prompt: Ids32 = field(repr=False, converter=_as_prompt)
    """The tokens before the answer."""
    sequence: SampledSequence
    """The answer as it was sampled."""
    message: dict[str, Any] = field(factory=dict)
    """The answer as a message."""
    extends: bool = False
    """True if the prompt begins with all tokens of the turn before."""
    stopped_at: str | None = None
    """The text of `stop` that ended the answer. The message ends before it, and the tokens after it."""

    @property
    def tokens(self) -> Ids32:
        """The sampled tokens.

        >>> Turn([1, 2], SampledSequence("stop", None, [3], [-0.5])).tokens.tolist()
        [3]
        """
        return as_ids(tokens_of(self.sequence), "sequence.tokens")

    @property
    def row(self) -> Ids32:
        """The tokens of the prompt and the answer.

        >>> Turn([1, 2], SampledSequence("stop", None, [3], [-0.5])).row.tolist()
        [1, 2, 3]
        """
        return np.concatenate([self.prompt, self.tokens])


class Conversation:
    """A chat of which answers are sampled: it gives each prompt, reads each answer, and makes the data.

    Not thread-safe. `fork` makes a copy, for example to sample several answers to one prompt.

    Args:
        tokenizer: a tokenizer with a chat template; the templates need the extra `chat`.
        messages: the first messages.
        tools: JSON schemas of functions that the model may call.
        chat_template: another template, or the name of one of the model's.
        variables: further variables of the template.

    Raises:
        InvalidInputError: there is no template, it shows no tools though some are given, or no special token
            ends the assistant's turn in it.

    >>> import tinker_sync
    >>> from tinker_sync.data import Conversation
    >>> with tinker_sync.ServiceClient(base_url="local") as service:
    ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
    ...     chat = Conversation(sampling.get_tokenizer())
    ...     for question in ("What is 23+45?", "What is 71-38?"):
    ...         chat.add({"role": "user", "content": question})
    ...         params = tinker_sync.SamplingParams(max_tokens=16, temperature=0.0, stop=chat.stop)
    ...         sampled = sampling.sample(chat.prompt(), 1, params).result()
    ...         print(chat.add_sampled(sampled.sequences[0])["content"])
    23+45=68
    71-38=33
    >>> datum = chat.datum([1.0, -1.0])  # an advantage for each turn
    >>> datum.loss_fn_inputs["advantages"].to_numpy()[-3:].tolist()
    [-1.0, -1.0, -1.0]
    """

    def __init__(
        self,
        tokenizer: Any,
        messages: Sequence[Message] = (),
        *,
        tools: Sequence[Tool] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools) if tools else None
        self._options = {"tools": self._tools, "chat_template": chat_template, **variables}
        self._template = str(tokenizer.get_chat_template(chat_template, self._tools))
        if self._tools and "tools" not in self._template:
            raise InvalidInputError("tools: the chat template shows the model no tools; give one that does")
        self._ends = _find_ends(tokenizer, self._template)
        self.messages: list[Message] = []
        """The chat so far."""
        self.turns: list[Turn] = []
        """The sampled answers so far."""
        self._shown = ""  # the rendered prompt of the last turn
        self._next: tuple[str, Ids32, bool] | None = None  # the prompt of the next turn
        self.add(*messages)

    @property
    def stop(self) -> list[int]:
        """The tokens that end an answer, for `SamplingParams`.

        >>> import tinker_sync
        >>> tokenizer = tinker_sync.get_tokenizer("tinker-sync/tiny")
        >>> tokenizer.decode(Conversation(tokenizer).stop)
        '<|im_end|>'
        """
        return list(self._ends.ids)

    def stop_with(self, texts: Sequence[str]) -> list[str]:
        """Return a `stop` for `SamplingParams`: `texts`, and the texts that end the turn of the model.

        >>> import tinker_sync
        >>> Conversation(tinker_sync.get_tokenizer("tinker-sync/tiny")).stop_with(["Observation:"])
        ['Observation:', '<|im_end|>']
        """
        return [*texts, *self._ends.texts]

    def add(self, *messages: Message) -> None:
        """Add messages of others than the model, such as the user's or the result of a tool.

        Raises:
            InvalidInputError: a message is not a dictionary with a role.

        >>> import tinker_sync
        >>> chat = Conversation(tinker_sync.get_tokenizer("tinker-sync/tiny"))
        >>> chat.add({"role": "user", "content": "Hello"})
        >>> len(chat.messages)
        1
        """
        if messages:
            refuse_odd_messages(messages)
            self.messages += messages
            self._next = None

    def prompt(self) -> ModelInput:
        """Return the prompt of the next answer. It begins with all tokens before, as they were sampled.

        Raises:
            InvalidInputError: there is no message yet, or the template refuses the chat.

        >>> import tinker_sync
        >>> tokenizer = tinker_sync.get_tokenizer("tinker-sync/tiny")
        >>> prompt = Conversation(tokenizer, [{"role": "user", "content": "Hello"}]).prompt()
        >>> tokenizer.decode(prompt.to_ints())
        '<|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\n'
        """
        return ModelInput.from_ints(self._prepare()[1])

    def add_sampled(self, sequence: SampledSequence, *, stop: Sequence[str] = ()) -> dict[str, Any]:
        """Add an answer to the prompt, and return it as a message, with the tool calls in it.

        A call that is not well-formed stays text.

        Args:
            sequence: the answer.
            stop: the texts that the sample was asked to stop at; the message ends before the first one.

        Raises:
            InvalidInputError: the sequence has no tokens or log-probabilities that fit.

        >>> import tinker_sync
        >>> tokenizer = tinker_sync.get_tokenizer("tinker-sync/tiny")
        >>> chat = Conversation(tokenizer, [{"role": "user", "content": "2 + 3?"}])
        >>> tokens = tokenizer.encode("5<|im_end|>")
        >>> chat.add_sampled(tinker_sync.SampledSequence("stop", None, tokens, [-0.1] * len(tokens)))
        {'role': 'assistant', 'content': '5'}
        """
        shown, prompt, extends = self._prepare()
        tokens = list(sequence.tokens)
        if tokens and tokens[-1] in self._ends.ids:
            del tokens[-1]
        text = self._tokenizer.decode(tokens)
        text, stopped_at = cut_at(text, stop)
        message = read_answer(text, self._template, prompt=shown, tools=self._tools)
        if extends:
            _share_prompts(self.turns, prompt)
        self.turns.append(Turn(prompt, sequence, message, extends, stopped_at))
        self.messages.append(message)
        self._shown, self._next = shown, None
        return message

    def fork(self) -> Conversation:
        """Return a copy, which goes on by itself.

        >>> import tinker_sync
        >>> chat = Conversation(tinker_sync.get_tokenizer("tinker-sync/tiny"))
        >>> chat.fork().add({"role": "user", "content": "Hello"})
        >>> chat.messages
        []
        """
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.messages, other.turns = list(self.messages), list(self.turns)
        return other

    # -------------------------------------------------------------------------------------- training

    def data(self, advantages: Advantages | Sequence[Advantages], *, provenance: bool = True) -> list[Datum]:
        """Make the data for `importance_sampling`, `ppo` and related losses from all turns.

        Turns whose prompts extend each other are one datum. There are several if the template rewrites
        earlier turns, or after an answer that a text of `stop` has ended.

        Args:
            advantages: one number for all turns, or for each turn a number, or one for each of its tokens.
            provenance: record the origin of the tokens, if the server gave the sequences ids.

        Raises:
            InvalidInputError: there is no turn, or the advantages do not fit.

        >>> import tinker_sync
        >>> tokenizer = tinker_sync.get_tokenizer("tinker-sync/tiny")
        >>> chat = Conversation(tokenizer, [{"role": "user", "content": "2 + 3?"}])
        >>> _ = chat.add_sampled(tinker_sync.SampledSequence("stop", None, [24, 2], [-0.1, -0.2]))
        >>> [datum] = chat.data(2.0)
        >>> datum.loss_fn_inputs["advantages"].to_numpy()[-3:].tolist()
        [0.0, 2.0, 2.0]
        """
        return make_data(self.turns, advantages, provenance=provenance)

    def datum(self, advantages: Advantages | Sequence[Advantages], *, provenance: bool = True) -> Datum:
        """Make the one datum of a conversation whose turns extend each other; see `data`.

        Raises:
            InvalidInputError: there are several, or the advantages do not fit.

        >>> import tinker_sync
        >>> tokenizer = tinker_sync.get_tokenizer("tinker-sync/tiny")
        >>> chat = Conversation(tokenizer, [{"role": "user", "content": "2 + 3?"}])
        >>> _ = chat.add_sampled(tinker_sync.SampledSequence("stop", None, [24, 2], [-0.1, -0.2]))
        >>> chat.datum(2.0).loss_fn_inputs["logprobs"].to_numpy()[-2:].round(1).tolist()
        [-0.10000000149011612, -0.20000000298023224]
        """
        return only_datum(self.data(advantages, provenance=provenance))

    # -------------------------------------------------------------------------------------- prompts

    def _prepare(self) -> tuple[str, Ids32, bool]:
        """Return the text of the next prompt, its tokens, and whether these begin with those of all turns."""
        if self._next is None:
            if not self.messages:
                raise InvalidInputError("conversation: there is no message yet; add one")
            text = self._tokenizer.apply_chat_template(
                self.messages, tokenize=False, add_generation_prompt=True, **self._options
            )
            rest = self._text_after_turn(text) if self.turns else None
            encoded = self._encode(text if rest is None else rest)
            ids = encoded if rest is None else np.concatenate([self.turns[-1].row, encoded])
            self._next = text, ids, rest is not None
        return self._next

    def _encode(self, text: str) -> Ids32:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def _text_after_turn(self, text: str) -> str | None:
        """Return the part of a rendered chat after the last answer, or None if the template rewrites turns.

        The part begins at the token that ends the answer, if the answer itself does not have it.
        """
        turn = self.turns[-1]
        if turn.stopped_at is not None or not text.startswith(self._shown):
            return None
        end = self._ends.pattern.search(text, len(self._shown))
        if end is None or not _shows(text[len(self._shown) : end.start()], turn.message):
            return None
        ended = len(turn.tokens) > 0 and int(turn.tokens[-1]) in self._ends.ids
        return text[end.end() if ended else end.start() :]


def _share_prompts(turns: Sequence[Turn], longer: Ids32) -> None:
    """Let the prompts of the last turns be views of one that begins with their tokens.

    With an array for each turn, a chat of 30 turns would take 15 times the memory.
    """
    for turn in reversed(turns):
        object.__setattr__(turn, "prompt", longer[: len(turn.prompt)])  # of the same value
        if not turn.extends:
            return


def cut_at(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """Return a text up to the first of the given ones, and which one that is.

    >>> cut_at("a Stop: b", ["b", "Stop:"])
    ('a ', 'Stop:')
    """
    found = [(place, each) for each in stop if (place := text.find(each)) >= 0]
    place, which = min(found, default=(len(text), None))
    return text[:place], which


def _shows(text: str, message: Mapping[str, Any]) -> bool:
    """Return True if the rendered answer has all parts of its message, however they are written."""
    parts = [message.get("reasoning_content") or "", message.get("content") or ""]
    parts += [call["function"]["name"] for call in message.get("tool_calls") or ()]
    place = 0
    for part in map(str.strip, parts):
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


@frozen
class _Ends:
    """The tokens that end an answer."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    pattern: re.Pattern[str]


@lru_cache(32)
def _find_ends(tokenizer: Any, template: str) -> _Ends:
    """Find the special token that a template puts after the assistant's text, by rendering a chat."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}]
    shown = tokenizer.apply_chat_template(chat, tokenize=False, chat_template=template)
    after = shown.rpartition(_PROBE)[2].lstrip()
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    special += tokenizer.all_special_tokens
    texts = sorted({text for text in special if text and after.startswith(text)}, key=len)[-1:]
    if not texts:
        raise InvalidInputError(
            "chat template: no special token follows the assistant's text, so the end of an answer cannot be "
            "told; give another chat_template"
        )
    texts += [text for text in _ENDS_OF_CALLS if text in special and text not in texts]
    ids = tokenizer.convert_tokens_to_ids(texts)
    return _Ends(tuple(ids), tuple(texts), re.compile("|".join(map(re.escape, texts))))


# ------------------------------------------------------------------------------------------- data


def make_data(
    turns: Sequence[Turn], advantages: Advantages | Sequence[Advantages], *, provenance: bool = True
) -> list[Datum]:
    """Make the data from turns in order: one datum for each run of turns that extend each other.

    The tokens between the answers get log-probability and advantage 0, so they do not affect the loss.

    Args:
        turns: the turns.
        advantages: one number for all turns, or for each turn a number, or one for each of its tokens.
        provenance: record the origin of the tokens, if the server gave the sequences ids.

    Raises:
        InvalidInputError: there is no turn, or an advantage or a sequence does not fit.

    >>> first = Turn([1, 2], SampledSequence("stop", None, [3], [-0.5]))
    >>> second = Turn([1, 2, 3, 4], SampledSequence("stop", None, [5], [-0.25]), extends=True)
    >>> [datum] = make_data([first, second], [1.0, -1.0])
    >>> datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()
    ([1, 2, 3, 4], [2, 3, 4, 5])
    >>> datum.loss_fn_inputs["advantages"].tolist(), datum.loss_fn_inputs["logprobs"].tolist()
    ([0.0, 1.0, 0.0, -1.0], [0.0, -0.5, 0.0, -0.25])
    """
    if not turns:
        raise InvalidInputError("turns: there is none; nothing was sampled")
    given: list[Any] = [advantages] * len(turns) if np.ndim(advantages) == 0 else list(advantages)  # type: ignore[arg-type]
    if len(given) != len(turns):
        raise InvalidInputError(
            f"advantages: expected one number, or {len(turns)}, one for each turn, got {len(given)}"
        )
    runs: list[list[tuple[Turn, Any]]] = []
    for index, (turn, advantage) in enumerate(zip(turns, given, strict=True)):
        numbers = as_numbers(advantage, f"advantages[{index}]")
        problems = list(find_problems(turn.sequence, numbers)) if len(turn.tokens) else []
        if problems:
            raise InvalidInputError([f"turns[{index}]: {each}" for each in problems])
        if turn.extends and runs:
            runs[-1].append((turn, numbers))
        else:
            runs.append([(turn, numbers)])
    # A limit of 0 tokens, or a full context, gives an answer without any, from which nothing can be learned.
    return [_make_datum(run, provenance) for run in runs if any(len(turn.tokens) for turn, _ in run)]


def only_datum(data: list[Datum]) -> Datum:
    """Return the one datum of a list, and refuse several."""
    if len(data) != 1:
        raise InvalidInputError(
            f"the turns are {len(data)} data, because the chat template rewrites earlier turns or a text of "
            "`stop` ended one; use data()"
        )
    return data[0]


def _make_datum(run: Sequence[tuple[Turn, Any]], provenance: bool) -> Datum:
    row = run[-1][0].row
    logprobs, advantages = np.zeros((2, len(row)), dtype=np.float32)
    for turn, given in run:
        place = slice(len(turn.prompt), len(turn.prompt) + len(turn.tokens))
        logprobs[place] = logprobs_of(turn.sequence)
        advantages[place] = given
    datum = Datum(
        ModelInput.from_ints(row[:-1]),
        {
            "target_tokens": row[1:].astype(np.int64),
            "logprobs": logprobs[1:],
            "advantages": advantages[1:],
        },
    )
    named = provenance and all(turn.sequence.sequence_id is not None for turn, _ in run)
    if not named:
        return datum
    turns = [turn for turn, _ in run]
    return datum.with_provenance(
        model_input=list(_spans(turns, 0, len(row) - 1)), loss_fn_inputs=list(_spans(turns, 1, len(row)))
    )


def _spans(turns: Sequence[Turn], first: int, last: int) -> Iterator[Any]:
    """Yield the origins of the tokens of a row from `first` to `last`, each turn with the text before it."""
    begin = 0
    for turn in turns:
        name, middle = str(turn.sequence.sequence_id), len(turn.prompt)
        end = middle + len(turn.tokens)
        for kind, low, high, zero in (
            (PromptProvenanceSpan, begin, middle, 0),
            (SampledProvenanceSpan, middle, end, middle),
        ):
            start, stop = max(low, first), min(high, last)
            if start < stop:
                yield kind(sequence_id=name, offset=start - zero, length=stop - start)
        begin = end
