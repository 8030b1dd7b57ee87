"""`BatchItem`: a prompt of a batch, with its response or its error."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen

from tinker_sync.errors import InvalidInputError
from tinker_sync.types import SampleResponse


@frozen(kw_only=True, eq=False)
class BatchItem:
    """A prompt of `SamplingClient.map`, with its response or its error.

    >>> item = BatchItem(index=3, prompt="2 + 3 =", error=InvalidInputError("prompt: is empty"))
    >>> item.ok, item
    (False, <BatchItem 3: InvalidInputError: prompt: is empty>)
    """

    index: int
    """The position of the prompt, from 0."""
    prompt: Any
    """The prompt as it was given."""
    response: SampleResponse | None = None
    """The response; None for a failed item."""
    error: Exception | None = None
    """The reason why the sample failed; None for a success."""
    saved: bool = False
    """True if the response comes from the file of an earlier run."""
    tokenizer: Any = field(default=None, repr=False)
    """The tokenizer of the batch, if it has one."""

    @property
    def ok(self) -> bool:
        """True if the sample succeeded."""
        return self.error is None

    def result(self) -> SampleResponse:
        """Return the response, or raise the error.

        >>> BatchItem(index=0, prompt="a", error=InvalidInputError("prompt: is empty")).result()
        Traceback (most recent call last):
        tinker_sync.errors.InvalidInputError: prompt: is empty
        """
        if self.error is not None:
            raise self.error
        assert self.response is not None  # noqa: S101  # an item has one of the two
        return self.response

    @property
    def texts(self) -> list[str]:
        """The text of each sampled sequence, without special tokens. Raises the error of a failed item.

        Raises:
            InvalidInputError: the batch has no tokenizer; pass `tokenizer=` to `map`.

        >>> BatchItem(index=0, prompt=[1], response=SampleResponse([])).texts
        Traceback (most recent call last):
        tinker_sync.errors.InvalidInputError: texts: the batch has no tokenizer; pass tokenizer= to map
        """
        response = self.result()
        if self.tokenizer is None:
            raise InvalidInputError("texts: the batch has no tokenizer; pass tokenizer= to map")
        return decode_all(self.tokenizer, response)

    def __repr__(self) -> str:
        if self.error is not None:
            about = f"{type(self.error).__name__}: {self.error}"
        else:
            count = len(self.result().sequences)
            about = f"{count} sequence{'' if count == 1 else 's'}{', saved' if self.saved else ''}"
        return f"<BatchItem {self.index}: {about}>"


def decode_all(tokenizer: Any, response: SampleResponse) -> list[str]:
    """Return the text of each sequence of a response, without special tokens."""
    return [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in response.sequences]
