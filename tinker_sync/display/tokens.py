"""A sample as text, each token shaded by its log-probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any, Final

from tinker_sync.display import page

if TYPE_CHECKING:
    from tinker_sync.types import SampledSequence, SampleResponse

# A token with a log-probability of -6 (a probability of 1/400) or less has the darkest shade.
_DARKEST: Final = 6.0
_MOST_TOKENS: Final = 2000
# The number of earlier tokens that are decoded together with a token, because they can change its text.
_CONTEXT: Final = 6


class Shaded:
    """The result of `shade`: a value that a notebook displays as HTML."""

    def __init__(self, html: str) -> None:
        self._html = html

    def _repr_html_(self) -> str:
        return self._html


def shade(sampled: SampleResponse | SampledSequence, tokenizer: Any) -> Shaded:
    """Return a value that a notebook displays as the text of a sample, decoded with the given tokenizer.

    Without `shade`, a notebook displays a sample as text if the process has loaded exactly one tokenizer,
    and names that one, because a sample does not know its model; else as token ids.

    >>> from tinker_sync import SampledSequence, get_tokenizer
    >>> from tinker_sync.local import tiny
    >>> tokenizer = get_tokenizer(str(tiny.directory()))
    >>> sequence = SampledSequence("length", None, tokenizer.encode("cat"), [-0.1, -3.0])
    >>> "cat" in "".join(pieces(sequence.tokens, tokenizer)), type(shade(sequence, tokenizer)).__name__
    (True, 'Shaded')
    """
    sequences: list[SampledSequence] | None = getattr(sampled, "sequences", None)
    given: list[Any] = [sampled] if sequences is None else list(sequences)
    return Shaded("".join(_shaded(one, tokenizer) for one in given))


def sequence_html(sequence: SampledSequence) -> str:
    """Return one sampled sequence as HTML."""
    return _shaded(sequence, _known_tokenizer(), guessed=True)


def response_html(response: SampleResponse) -> str:
    """Return the sequences of a response, at most 20, as HTML."""
    tokenizer = _known_tokenizer()
    parts = [_shaded(sequence, tokenizer, guessed=True) for sequence in response.sequences[:20]]
    more = len(response.sequences) - len(parts)
    return "".join(parts) + (page.note(f"and {more} more sequences") if more else "")


def pieces(tokens: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text that each token adds to the tokens before it; without a tokenizer, its id as text.

    >>> pieces([5, 6], None)
    ['5', '6']
    """
    if tokenizer is None:
        return [str(token) for token in tokens]
    found = []
    for at in range(len(tokens)):
        begin = max(0, at - _CONTEXT)
        before = tokenizer.decode(tokens[begin:at]) if at > begin else ""
        through = tokenizer.decode(tokens[begin : at + 1])
        # Several tokens may hold the bytes of one character; the last of these tokens gets the character.
        complete = not through.endswith("\ufffd")
        found.append(through[len(before.rstrip("\ufffd")) :] if complete else "")
    return found


def _known_tokenizer() -> Any:
    from tinker_sync.text.loading import find_only_tokenizer

    return find_only_tokenizer()


def _shaded(sequence: SampledSequence, tokenizer: Any, *, guessed: bool = False) -> str:
    tokens, logprobs = sequence.tokens, sequence.logprobs
    if guessed and tokenizer is not None and max(tokens, default=0) >= len(tokenizer):
        tokenizer = None  # the sample is of a model with more tokens
    shown = tokens[:_MOST_TOKENS]
    gap = "" if tokenizer is not None else " "
    body = gap.join(
        _span(text, token, None if logprobs is None else logprobs[at])
        for at, (token, text) in enumerate(zip(shown, pieces(shown, tokenizer), strict=True))
    )
    ending = {"length": "stopped by max_tokens", "stop": "stopped by itself"}[sequence.stop_reason]
    words = [f"{len(tokens)} tokens", ending]
    if logprobs:
        words.append(f"mean log-probability {sum(logprobs) / len(logprobs):.3f}")
    if tokenizer is None:
        words.append("token ids; shade(sample, tokenizer) shows text")
    elif guessed:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        words.append(f"text of the tokenizer of {name}")
    if len(tokens) > len(shown):
        words.append(f"the first {len(shown)} are shown")
    return (
        '<div style="border-left:3px solid #3b82f6;padding:2px 10px;margin:4px 0">'
        '<div style="white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace">'
        f"{body}</div>{page.note(', '.join(words))}</div>"
    )


def _span(text: str, token: int, logprob: float | None) -> str:
    visible = escape(text).replace("\n", "↵\n")
    if logprob is None or logprob != logprob:
        return f'<span title="token {token}">{visible}</span>'
    # The square root keeps a token of probability one half visibly shaded, also on a dark page.
    shade_of_it = math.sqrt(min(1.0, max(0.0, -logprob / _DARKEST))) * 0.6
    chance = 2.718281828 ** min(logprob, 0.0)
    title = f"token {token}: log-probability {logprob:.3f}, probability {chance:.2%}"
    return f'<span title="{title}" style="background:rgba(239,68,68,{shade_of_it:.2f})">{visible}</span>'
