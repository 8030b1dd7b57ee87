"""`map_samples`: samples any number of prompts through a moving window.

A prompt is in the window from the moment it is pulled until its item is yielded. The window has at most
`max_in_flight` prompts, so neither memory nor the number of requests grows with the input.
"""

from __future__ import annotations

import os
import queue
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, cast

from attrs import define, field, frozen

from tinker_sync._base.api_errors import copy_exception
from tinker_sync._base.clock import slice_of
from tinker_sync._base.naming import find_call_site
from tinker_sync.batch.item import BatchItem, decode_all
from tinker_sync.batch.results import MODEL, ForeignResultError, ResultsFile, key_of
from tinker_sync.batch.waiting import ProgressBar
from tinker_sync.errors import (
    AuthenticationError,
    BudgetExceededError,
    ClientClosedError,
    InvalidInputError,
    SessionLostError,
    TinkerError,
    UnsupportedByServerError,
    with_words,
)
from tinker_sync.types import ModelInput, SampleRequest, SampleResponse, SamplingParams
from tinker_sync.types._checks import as_whole
from tinker_sync.types._structured import is_foreign, model_from

if TYPE_CHECKING:
    from typing import TypeAlias


Chat: TypeAlias = Sequence[Mapping[str, Any]]
Prompt: TypeAlias = ModelInput | str | Sequence[int] | Chat
OnError: TypeAlias = Literal["return", "raise"]

_ENDS_ALL: Final = (AuthenticationError, BudgetExceededError, ClientClosedError, SessionLostError)
"""Errors that end the batch, because each later prompt would fail with them too."""
_OF_THE_PROMPT: Final = (InvalidInputError, UnsupportedByServerError, TypeError, ValueError)


class Samples(Protocol):
    """The part of a sampling client that a batch uses."""

    @property
    def sample(self) -> Callable[..., Future[SampleResponse]]:
        """The method that starts a sample."""

    def get_tokenizer(self) -> Any:
        """Return the tokenizer of the model."""


@define
class Order:
    """The arguments of `SamplingClient.map` that apply to each prompt."""

    client: Samples
    sampling_params: SamplingParams
    num_samples: int
    options: Mapping[str, Any]
    """Further arguments of `sample`."""
    tokenizer: Any = None
    model: str | None = None
    """The path of the weights, or the base model. None for weights without a name."""

    def model_input(self, prompt: Prompt) -> ModelInput:
        """Return a prompt as the input of the model; text and chats are encoded.

        The first text or chat loads the tokenizer of the model, unless one was given.

        Raises:
            NotPromptsError: the prompt is a dictionary, such as a row of a dataset.
        """
        if isinstance(prompt, ModelInput):
            return prompt
        if is_foreign(ModelInput, prompt):
            return model_from(ModelInput, prompt, "prompt")
        if isinstance(prompt, str):
            return ModelInput.from_text(prompt, self._known_tokenizer())
        if isinstance(prompt, Mapping):
            raise NotPromptsError(_advise_on_rows(prompt))
        if _is_chat(prompt):
            return ModelInput.from_chat(cast("Chat", prompt), self._known_tokenizer())
        return ModelInput.from_ints(prompt)  # type: ignore[arg-type]  # it refuses other objects than rows of tokens

    def _known_tokenizer(self) -> Any:
        if self.tokenizer is None:
            self.tokenizer = self.client.get_tokenizer()
        return self.tokenizer

    def key(self, prompt: ModelInput) -> str:
        """Return the key of a prompt in the file of results; see `key_of`."""
        asked = dict(self.options)
        asked.pop("deadline", None)
        asked["prompt_logprobs"] = asked.pop("include_prompt_logprobs", False)
        return key_of(
            SampleRequest(
                prompt=prompt, num_samples=self.num_samples, sampling_params=self.sampling_params, **asked
            )
        )

    def start(self, prompt: ModelInput) -> Future[SampleResponse]:
        """Start the sample of a prompt."""
        return self.client.sample(prompt, self.num_samples, self.sampling_params, **self.options)

    def readable(self, prompt: Prompt, response: SampleResponse) -> dict[str, Any]:
        """Return further fields of a line of the file of results.

        These are the model, the prompt, if it is a text or a chat, and the sampled texts. The texts are
        missing as long as there is no tokenizer: none was given, and no prompt has needed one yet.
        """
        shown: dict[str, Any] = {} if self.model is None else {MODEL: self.model}
        if not isinstance(prompt, ModelInput) and _is_text(prompt):
            shown["prompt"] = prompt
        return shown if self.tokenizer is None else {**shown, "texts": decode_all(self.tokenizer, response)}


class NotPromptsError(InvalidInputError):
    """The error for a list of something else than prompts; it ends the batch."""


_COLUMNS: Final = ("prompt", "messages", "question", "text", "input", "instruction")


def _advise_on_rows(row: Mapping[Any, Any]) -> str:
    if {"role", "content"} <= row.keys():
        return "prompts: expected a list of chats, got the messages of one; write map([messages], ...)"
    column = next((name for name in _COLUMNS if name in row), next(iter(row), "prompt"))
    names = ", ".join(map(repr, list(row)[:10]))
    return (
        f"prompts: expected texts, chats, token ids or inputs of the model, got a dictionary with {names}; "
        f"give the prompt of each row: map((row[{column!r}] for row in rows), ...)"
    )


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _is_text(prompt: Any) -> bool:
    return isinstance(prompt, str) or _is_chat(prompt)


@frozen
class Window:
    """The size of the window, the order of items, and the handling of errors."""

    max_in_flight: int
    ordered: bool
    on_error: OnError


def map_samples(
    prompts: Iterable[Prompt],
    order: Order,
    window: Window,
    *,
    save_to: str | os.PathLike[str] | None,
    progress: bool,
    total: int | None,
) -> Generator[BatchItem, None, None]:
    """Check the arguments of `SamplingClient.map`, and return the items as a generator.

    The first item opens the file `save_to`, so errors of the file are raised then. A generator that is
    dropped before its first item has sampled nothing, and warns.

    Raises:
        InvalidInputError: an argument is not valid; nothing was sent.
    """
    _check(prompts, order, window)
    if total is None and isinstance(prompts, Sized):
        total = len(prompts)
    open_bar = partial(ProgressBar, progress, total, "samples")

    def begin() -> Generator[BatchItem, None, None]:
        unstarted.detach()
        yield from _run(iter(prompts), order, window, save_to, open_bar)

    items = begin()
    _, code, line = find_call_site()
    unstarted = weakref.finalize(items, _warn_of_unstarted, code.co_filename, line)
    unstarted.atexit = False
    return items


def _warn_of_unstarted(filename: str, line: int) -> None:
    text = (
        "map has sampled nothing, because nobody took its items; write: for item in sampling.map(...), "
        "or list(sampling.map(...))"
    )
    warnings.warn_explicit(text, RuntimeWarning, filename, line)


def _check(prompts: Any, order: Order, window: Window) -> None:
    if isinstance(prompts, (str, bytes, ModelInput)):
        kind = type(prompts).__name__
        raise InvalidInputError(f"map: prompts is one {kind}; give a list or a generator, or use sample")
    if not isinstance(prompts, Iterable):
        raise InvalidInputError(
            f"map: prompts: expected a list or a generator of prompts, got {type(prompts).__name__}"
        )
    params: Any = order.sampling_params
    if not (isinstance(params, SamplingParams) or is_foreign(SamplingParams, params)):
        raise InvalidInputError(f"map: sampling_params: expected SamplingParams, got {type(params).__name__}")
    if (as_whole(window.max_in_flight) or 0) < 1:
        raise InvalidInputError(f"map: max_in_flight: expected 1 or more, got {window.max_in_flight!r}")
    if window.on_error not in ("return", "raise"):
        raise InvalidInputError(f"map: on_error: expected 'return' or 'raise', got {window.on_error!r}")


def _run(
    prompts: Iterator[Prompt],
    order: Order,
    window: Window,
    save_to: str | os.PathLike[str] | None,
    open_bar: Callable[[], ProgressBar],
) -> Generator[BatchItem, None, None]:
    batch = _Batch(prompts, order, window, None if save_to is None else ResultsFile(save_to))
    bar = open_bar()
    try:
        while (item := batch.next_item()) is not None:
            if item.saved:
                bar.skip()
            else:
                bar.advance(failed=not item.ok)
            if window.on_error == "raise" and item.error is not None:
                raise _add_position(item)
            batch.fill()  # the server works while the caller processes the item
            yield item
            del item
        if batch.end is not None:
            raise batch.end
    finally:
        batch.close()
        bar.close()


def _add_position(item: BatchItem) -> Exception:
    """Return a copy of the error of an item; the text of a TinkerError then names the position."""
    assert item.error is not None  # noqa: S101  # checked by the caller
    error = copy_exception(item.error)
    if isinstance(error, TinkerError):
        with_words(error, f"prompts[{item.index}]")
    return error


@define(eq=False)
class _Batch:
    """The prompts in the window. Futures call `_hand_over`; only the caller's thread calls other methods."""

    prompts: Iterator[Prompt]
    order: Order
    window: Window
    file: ResultsFile | None
    end: Exception | None = None
    """The error that ends the batch, raised after the last item."""
    _arrived: queue.SimpleQueue[BatchItem | Exception] = field(factory=queue.SimpleQueue, init=False)
    _under_way: dict[int, Future[SampleResponse]] = field(factory=dict, init=False)
    _early: dict[int, BatchItem] = field(factory=dict, init=False)  # arrived before their turn
    _pulled: int = field(default=0, init=False)
    _yielded: int = field(default=0, init=False)
    _exhausted: bool = field(default=False, init=False)
    _process: int = field(factory=os.getpid, init=False)

    def next_item(self) -> BatchItem | None:
        """Wait for the next item and return it, or None after the last.

        Raises:
            Exception: a response could not be written to the file.
            TinkerError: the parent of this forked process has begun the batch.
        """
        if self._inherited:
            raise TinkerError(
                "this map was begun before the process was forked; its results arrive in the parent only"
            )
        self.fill()
        if self._yielded == self._pulled:
            return None
        if self.window.ordered:
            while self._yielded not in self._early:
                arrived = self._receive()
                self._early[arrived.index] = arrived
            item = self._early.pop(self._yielded)
        else:
            item = self._receive()
        self._yielded += 1
        return item

    def fill(self) -> None:
        """Pull prompts and start their samples, until the window is full.

        Stop for good when no prompt is left, or when an error ends the batch.
        """
        while not self._exhausted and self._pulled - self._yielded < self.window.max_in_flight:
            try:
                prompt = next(self.prompts)
            except StopIteration:
                self._exhausted = True
            except Exception as error:  # noqa: BLE001  # raised after the last item is yielded
                self._stop(error)
            else:
                self._take_in(prompt)

    def close(self) -> None:
        """Cancel the samples under way. Results that have arrived are still written.

        Do nothing in a forked child: the samples are those of the parent, and one of its threads may have
        held the lock of the file at the fork.
        """
        if self._inherited:
            return
        self._exhausted = True
        for future in self._under_way.values():
            future.cancel()
        self._under_way = {}
        if self.file is not None:
            self.file.close()

    @property
    def _inherited(self) -> bool:
        return self._process != os.getpid()

    def _stop(self, reason: Exception) -> None:
        self._exhausted = True
        self.end = self.end or reason

    # -------------------------------------------------------------------------------------- into the window

    def _take_in(self, prompt: Prompt) -> None:
        try:
            self._start(self._pulled, prompt)
        except (ForeignResultError, NotPromptsError) as error:
            self._stop(error)
        except _OF_THE_PROMPT as error:
            self._arrived.put(self._make_item(self._pulled, prompt, error=error))
            self._pulled += 1
        except TinkerError as error:  # the client cannot go on
            self._stop(error)
        else:
            self._pulled += 1

    def _start(self, index: int, prompt: Prompt) -> None:
        """Find the response of a prompt in the file, or start its sample."""
        file, key = self.file, ""
        model_input = self.order.model_input(prompt)
        if file is not None:
            key = self.order.key(model_input)
            if (saved := file.find(index, key, self.order.model)) is not None:
                self._arrived.put(self._make_item(index, prompt, response=saved, saved=True))
                return
        future = self._under_way[index] = self.order.start(model_input)
        if file is not None:
            file.hold()
        future.add_done_callback(partial(self._hand_over, index, prompt, key))

    # -------------------------------------------------------------------------------------- out of the window

    def _make_item(self, index: int, prompt: Prompt, **outcome: Any) -> BatchItem:
        return BatchItem(index=index, prompt=prompt, tokenizer=self.order.tokenizer, **outcome)

    def _hand_over(self, index: int, prompt: Prompt, key: str, future: Future[SampleResponse]) -> None:
        """Save the response of a sample, if there is a file, and hand the item to the caller's thread.

        Runs on the thread that ends the future, usually a callback worker of the client.
        """
        arrived: BatchItem | Exception
        try:
            response = future.result()
        except Exception as error:  # noqa: BLE001  # it becomes the error of the item
            if self.file is not None:
                self.file.release()
            arrived = self._make_item(index, prompt, error=error)
        else:
            arrived = self._make_item(index, prompt, response=response)
            if self.file is not None:
                try:
                    self.file.add(index, key, response, self.order.readable(prompt, response))
                except Exception as error:  # noqa: BLE001  # a batch whose file fails must stop
                    arrived = error
        self._arrived.put(arrived)

    def _receive(self) -> BatchItem:
        """Return the next item that arrives, or raise the failure of the file.

        The wait is in short slices, so that Ctrl-C interrupts it.
        """
        while True:
            try:
                arrived = self._arrived.get(timeout=slice_of(float("inf")))
            except queue.Empty:
                continue
            if isinstance(arrived, Exception):
                raise arrived
            self._under_way.pop(arrived.index, None)
            if isinstance(arrived.error, _ENDS_ALL):
                self._stop(arrived.error)
            return arrived
