"""A record of the work that the engine of an embedded server in this process does, in order.

Tests compare it with the results of a client. Each datum, step and checkpoint of these tests has a unique
mark, see `datum_of` and `step_of`. The ledger has the marks in the work that the engine really did, in spite
of all retries and queues before it.
"""

from __future__ import annotations

import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from attrs import frozen

from tinker_sync import types
from tinker_sync.local.engine.host import Host
from tinker_sync.local.store import Store

VOCABULARY = 256
_STEP = 1e-9
_BASE = 1e-3


def datum_of(mark: int, length: int = 3) -> types.Datum:
    """Return a datum that carries a mark in its first three tokens."""
    high, low = divmod(mark, VOCABULARY)
    tokens = [*divmod(high, VOCABULARY), low, *[(mark + number) % VOCABULARY for number in range(length - 3)]]
    targets = [(token + mark) % VOCABULARY for token in tokens]
    return types.Datum(
        types.ModelInput.from_ints(tokens), {"target_tokens": targets, "weights": [1.0] * length}
    )


def step_of(mark: int) -> types.AdamParams:
    """Return the settings of a step that carries a mark in its learning rate."""
    return types.AdamParams(learning_rate=_BASE + mark * _STEP)


@frozen
class Applied:
    """A pass, a step or a checkpoint that the engine has done on a model."""

    kind: str
    marks: tuple[Any, ...]
    """The marks of the data or of the step, or the name of the checkpoint."""
    logprobs: tuple[tuple[float, ...], ...] = ()
    """The result of a pass, for each datum."""


class Ledger:
    """The work on each model, in order. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: dict[str, list[Applied]] = defaultdict(list)  # guarded by _lock
        self.saved: dict[str, str] = {}
        """A digest of the numbers in each checkpoint, by its path; the threads of the server write."""

    def note(self, run_id: str, applied: Applied) -> None:
        with self._lock:
            self._runs[run_id].append(applied)

    def with_marks(self, marks: Iterable[Any]) -> list[list[Applied]]:
        """Return a list of all work for each model on which the engine did work with one of these marks."""
        wanted = set(marks)
        with self._lock:
            runs = [list(run) for run in self._runs.values()]
        return [run for run in runs if any(wanted & set(applied.marks) for applied in run)]

    def forget(self) -> None:
        with self._lock:
            self._runs.clear()


class _Watched:
    """A trainer of the engine that records its passes and steps in the ledger."""

    def __init__(self, run: Any, run_id: str, ledger: Ledger) -> None:
        self._run, self._run_id, self._ledger = run, run_id, ledger

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def forward_backward(self, data: Sequence[Any], *args: Any) -> Any:
        return self._pass("forward_backward", self._run.forward_backward, data, args)

    def forward(self, data: Sequence[Any], *args: Any) -> Any:
        return self._pass("forward", self._run.forward, data, args)

    def _pass(self, kind: str, work: Callable[..., Any], data: Sequence[Any], args: Any) -> Any:
        output = work(data, *args)
        marks = tuple(_mark_of(one.tokens) for one in data)
        logprobs = tuple(tuple(map(float, one)) for one in output.logprobs)
        self._ledger.note(self._run_id, Applied(kind, marks, logprobs))
        return output

    def optim_step(self, settings: Any) -> Any:
        norm = self._run.optim_step(settings)
        mark = round((settings.learning_rate - _BASE) / _STEP)
        self._ledger.note(self._run_id, Applied("optim_step", (mark,)))
        return norm


def _mark_of(tokens: Any) -> int:
    high, middle, low = (int(token) for token in tokens[:3])
    return (high * VOCABULARY + middle) * VOCABULARY + low


@contextmanager
def engine_ledger() -> Iterator[Ledger]:
    """Record the work of the engine until the end of the block. Start the server inside the block."""
    ledger = Ledger()
    train, save = Host.train, Store.save_checkpoint

    def watched_train(host: Host, run_id: str, job: Callable[[Any], Any]) -> Any:
        return train(host, run_id, lambda run: job(_Watched(run, run_id, ledger)))

    def watched_save(store: Store, run_id: str, kind: Any, name: str, *content: Any, **options: Any) -> Any:
        saved = save(store, run_id, kind, name, *content, **options)
        ledger.note(run_id, Applied("save", (name,)))
        _, arrays = store.load_checkpoint(run_id, kind, name)
        numbers = b"".join(arrays[each].tobytes() for each in sorted(arrays))
        ledger.saved[saved.tinker_path] = hashlib.sha256(numbers).hexdigest()
        return saved

    Host.train = watched_train  # type: ignore[method-assign, assignment]
    Store.save_checkpoint = watched_save  # type: ignore[method-assign, assignment]
    try:
        yield ledger
    finally:
        Host.train = train  # type: ignore[method-assign]
        Store.save_checkpoint = save  # type: ignore[method-assign]
