"""What has passed through a gateway: exchanges, their file, and the trajectories that they form. Pure.

An exchange is one sampled answer with its prompt. Exchanges in which each continues the one before form a
trajectory; an answer that is continued twice begins a second one, in which it is not trained again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import define, field, frozen

from tinker_sync._base.jsonl import read_lines
from tinker_sync.data.conversation import Turn, make_data, only_datum
from tinker_sync.data.samples import Advantages, logprobs_of
from tinker_sync.errors import InvalidInputError
from tinker_sync.types import Datum, SampledSequence


@define
class Asked:
    """A request of an agent, whatever its form was."""

    messages: list[dict[str, Any]] = field(factory=list)
    tools: list[dict[str, Any]] | None = None
    n: int = 1
    stop: list[str] = field(factory=list)
    topk: int = 0
    """How many of the likeliest tokens to return at each position."""
    settings: dict[str, Any] = field(factory=dict)
    """Fields of `SamplingParams` that the request sets."""
    variables: dict[str, Any] = field(factory=dict)
    """Variables of the chat template."""
    unenforced: list[str] = field(factory=list)
    """Settings that the model may follow or not, because the server cannot restrict what it samples."""


@frozen
class Answer:
    """A sampled answer, for the form in which the agent asked."""

    message: Mapping[str, Any]
    sequence: SampledSequence
    stopped_at: str | None = None
    """The text of the request's `stop` that ended it."""


@frozen(eq=False)
class Exchange:
    """One sampled answer, with the exact tokens of its prompt.

    >>> turn = Turn([1, 2], SampledSequence("stop", None, [3], [-0.5]), {"role": "assistant", "content": "5"})
    >>> exchange = Exchange("chatcmpl-1", turn, [{"role": "user", "content": "2 + 3?"}])
    >>> exchange.turn.prompt.tolist(), exchange.turn.tokens.tolist(), exchange.version
    ([1, 2], [3], 0)
    """

    id: str
    """The id of the answer, which the agent sees too; with ``n``, followed by the number of the choice."""
    turn: Turn
    """The tokens of the prompt and the answer, and the answer as a message."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The messages that came with the request after those of the exchange before."""
    parent: str | None = None
    """The id of the exchange that this one continues."""
    label: str = ""
    """The label in the address that the agent used."""
    version: Any = 0
    """The version of the weights that sampled."""
    created: float = 0.0
    """The time of the answer, in seconds since 1970."""

    def to_plain(self) -> dict[str, Any]:
        """Return the exchange as plain data, as it is written to a file.

        >>> turn = Turn([1, 2], SampledSequence("stop", None, [3], [-0.5]))
        >>> Exchange("chatcmpl-1", turn).to_plain()["tokens"]
        [3]
        """
        sequence = self.turn.sequence
        return {
            "id": self.id,
            "parent": self.parent,
            "label": self.label,
            "version": self.version,
            "created": self.created,
            "messages": list(self.messages),
            "answer": self.turn.message,
            "prompt": self.turn.prompt.tolist(),
            "tokens": self.turn.tokens.tolist(),
            "logprobs": logprobs_of(sequence).tolist(),
            "stop_reason": sequence.stop_reason,
            "sequence_id": sequence.sequence_id,
            "extends": self.turn.extends,
        }

    @classmethod
    def from_plain(cls, tree: Mapping[str, Any]) -> Exchange:
        """Return the exchange of `to_plain`.

        Raises:
            InvalidInputError: a field is missing.

        >>> turn = Turn([1, 2], SampledSequence("stop", None, [3], [-0.5]))
        >>> Exchange.from_plain(Exchange("chatcmpl-1", turn).to_plain()).id
        'chatcmpl-1'
        """
        try:
            sequence = SampledSequence(
                tree["stop_reason"],
                tree["sequence_id"],
                np.asarray(tree["tokens"], np.int32),
                np.asarray(tree["logprobs"], np.float32),
            )
            turn = Turn(tree["prompt"], sequence, tree["answer"], tree["extends"])
            others = {
                name: tree[name] for name in ("id", "messages", "parent", "label", "version", "created")
            }
            return cls(turn=turn, **others)
        except (KeyError, TypeError) as error:
            raise InvalidInputError(f"exchange: {type(error).__name__}: {error}") from None


@frozen(eq=False)
class Trajectory:
    """A conversation of one agent, from its first answer to its last.

    >>> turn = Turn([1, 2], SampledSequence("stop", None, [3], [-0.5]), {"role": "assistant", "content": "5"})
    >>> exchange = Exchange("chatcmpl-1", turn, [{"role": "user", "content": "2 + 3?"}])
    >>> [trajectory] = to_trajectories([exchange])
    >>> trajectory.messages[-1]["content"], trajectory.datum(1.0).loss_fn_inputs["advantages"].tolist()
    ('5', [0.0, 1.0])
    """

    exchanges: Sequence[Exchange]
    """The exchanges, in order."""
    messages: Sequence[Mapping[str, Any]] = field(repr=False)
    """The whole chat, with the last answer."""

    @property
    def label(self) -> str:
        """The label in the address that the agent used.

        >>> turn = Turn([1, 2], SampledSequence("stop", None, [3], [-0.5]))
        >>> Trajectory([Exchange("chatcmpl-1", turn, label="task-7")], []).label
        'task-7'
        """
        return self.exchanges[0].label

    @property
    def turns(self) -> list[Turn]:
        """The sampled answers, each with its prompt.

        >>> turn = Turn([1, 2], SampledSequence("stop", None, [3], [-0.5]))
        >>> len(Trajectory([Exchange("chatcmpl-1", turn)], []).turns)
        1
        """
        return [exchange.turn for exchange in self.exchanges]

    def data(self, advantages: Advantages | Sequence[Advantages], *, provenance: bool = True) -> list[Datum]:
        """Make the data for `importance_sampling`, `ppo` and related losses; see `Conversation.data`.

        Args:
            advantages: one number for all turns, or for each turn a number, or one for each of its tokens.
            provenance: record the origin of the tokens, if the server gave the sequences ids.

        Raises:
            InvalidInputError: the advantages do not fit.

        >>> turn = Turn([1, 2], SampledSequence("stop", None, [3], [-0.5]))
        >>> len(Trajectory([Exchange("chatcmpl-1", turn)], []).data(0.5))
        1
        """
        return make_data(self.turns, advantages, provenance=provenance)

    def datum(self, advantages: Advantages | Sequence[Advantages], *, provenance: bool = True) -> Datum:
        """Make the one datum of a conversation whose turns extend each other; see `Conversation.datum`.

        Raises:
            InvalidInputError: there are several, or the advantages do not fit.

        >>> turn = Turn([1, 2], SampledSequence("stop", None, [3], [-0.5]))
        >>> Trajectory([Exchange("chatcmpl-1", turn)], []).datum(0.5).model_input.to_ints()
        [1, 2]
        """
        return only_datum(self.data(advantages, provenance=provenance))


def to_trajectories(exchanges: Iterable[Exchange]) -> list[Trajectory]:
    """Form trajectories from exchanges in the order in which they were answered.

    >>> ask, again = {"role": "user", "content": "2 + 3?"}, {"role": "user", "content": "Sure?"}
    >>> turn = Turn([1, 2], SampledSequence("stop", None, [3], [-0.5]), {"role": "assistant", "content": "5"})
    >>> first, second = Exchange("a", turn, [ask]), Exchange("b", turn, [again], parent="a")
    >>> [len(trajectory.exchanges) for trajectory in to_trajectories([first, second])]
    [2]
    """
    known: dict[str, Exchange] = {}
    chains: dict[str, list[Exchange]] = {}  # by the id of the last exchange
    for exchange in exchanges:
        chain = chains.pop(exchange.parent, []) if exchange.parent is not None else []
        chains[exchange.id] = [*chain, exchange]
        known[exchange.id] = exchange
    made = [Trajectory(chain, _chat_of(chain[-1], known)) for chain in chains.values()]
    order = {name: place for place, name in enumerate(known)}
    return sorted(made, key=lambda each: order[each.exchanges[0].id])


def _chat_of(last: Exchange, known: Mapping[str, Exchange]) -> list[Mapping[str, Any]]:
    pieces: list[Sequence[Mapping[str, Any]]] = []
    exchange: Exchange | None = last
    while exchange is not None:
        pieces.append([*exchange.messages, exchange.turn.message])
        exchange = known.get(exchange.parent) if exchange.parent is not None else None
    return [message for piece in reversed(pieces) for message in piece]


def read_exchanges(path: str | os.PathLike[str]) -> list[Exchange]:
    """Read the file that a gateway has written with ``record=``. A line that was cut short is left out.

    Raises:
        InvalidInputError: a line is no exchange.
        OSError: the file cannot be read.

    >>> import json, tempfile
    >>> path = Path(tempfile.mkdtemp(), "exchanges.jsonl")
    >>> turn = Turn([1, 2], SampledSequence("stop", None, [3], [-0.5]))
    >>> _ = path.write_text(json.dumps(Exchange("chatcmpl-1", turn).to_plain()))
    >>> [exchange.id for exchange in read_exchanges(path)]
    ['chatcmpl-1']
    """
    return [Exchange.from_plain(line) for _, line in read_lines(Path(path))]
