"""`StepRecorder`: metrics, timings and usage of each step of a training loop, as JSON lines."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tinker_sync._base.clock import Clock
from tinker_sync._base.jsonl import append_line
from tinker_sync.errors import InvalidInputError
from tinker_sync.insight.meter import TokenCounts
from tinker_sync.types._checks import as_whole

if TYPE_CHECKING:
    from typing_extensions import Self

FILE_NAME: Final = "metrics.jsonl"
_OURS: Final = frozenset({"step", "time", "step_s", "call_s", "tokens"})


class StepRecorder:
    """A recorder that writes a line of JSON for each step of a training loop. One thread at a time may log.

    A line has the step, the time, the metrics of the given results, values of your own, `step_s` (the seconds
    since the previous line), `call_s` (the seconds of the longest given call, from the queue to its result),
    and the tokens used since the previous line. The first line counts from the creation of the recorder.
    `log` returns after it has written the line to the file. If a resumed loop repeats a step, the later line
    of the step counts.

    A result with `advice`, such as that of `losses.divergence`, is also noted for `ServiceClient.explain`.

    `ServiceClient.recorder` makes the object. `log` returns the line, for other recorders:

        line = recorder.log(step, passed, reward=reward)
        wandb.log(line, step=step)
        for name in ("loss:mean", "reward"):
            tensorboard_writer.add_scalar(name, line[name], step)

    Args:
        directory: the directory of the run; lines are appended to `metrics.jsonl` in it.
        count: returns the tokens that the client has used so far.
        clock: measures the steps.
        note: gets the number of a step and the advice of its results.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        count: Callable[[], TokenCounts],
        *,
        clock: Clock,
        note: Callable[[int, Sequence[str]], None] | None = None,
    ) -> None:
        self.path = Path(directory) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._count, self._clock, self._note = count, clock, note
        self._file = self.path.open("a+b", buffering=0)
        self._began_s = clock.now()
        self._counted = count()

    def log(self, step: int, *results: Any, **values: float | int | str | None) -> dict[str, Any]:
        """Write the line of a step, and return it.

        Args:
            step: the number of the step.
            results: futures of calls, for which this method waits, results with `metrics`, or mappings of
                metrics. A metric with a name that the recorder itself writes is left out.
            values: further values, such as `reward=0.5`. A number that is not finite becomes None.

        Raises:
            InvalidInputError: the recorder is closed, the step is not a whole number from 0 on, a result has
                no metrics, a value is an array, or a value has a name that the recorder itself writes.
            OSError: the line cannot be written, or only its beginning.
            Exception: a given future has failed.

        >>> import tempfile, tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service, tempfile.TemporaryDirectory() as to:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     datum = tinker_sync.Datum(tinker_sync.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
        ...     with service.recorder(f"{to}/runs/x") as recorder:
        ...         line = recorder.log(0, training.forward_backward([datum], "cross_entropy"), reward=0.5)
        >>> line["reward"], line["tokens"], sorted(line)[:4]
        (0.5, {'trained': 2}, ['call_s', 'loss:mean', 'loss:sum', 'reward'])
        """
        if self._file.closed:
            raise InvalidInputError("log: the recorder is closed; make another one for the same directory")
        number = as_whole(step)
        if number is None or number < 0:
            raise InvalidInputError(f"log: step: expected a whole number from 0 on, got {step!r}")
        if taken := _OURS & values.keys():
            raise InvalidInputError(f"log: {min(taken)!r} is written by the recorder; use another name")
        metrics: dict[str, Any] = {}
        calls_s = [_took_s(result) for result in results if isinstance(result, Future)]
        for index, result in enumerate(results):
            metrics.update(_metrics_of(result, index))
        now_s, counted = self._clock.now(), self._count()
        line = {
            "step": number,
            "time": round(self._clock.time(), 3),
            **{
                name: _plain(name, value)
                for name, value in {**metrics, **values}.items()
                if name not in _OURS
            },
            "step_s": round(now_s - self._began_s, 6),
            **({"call_s": round(max(calls_s), 6)} if calls_s else {}),
            "tokens": dict((counted - self._counted).items()),
        }
        self._began_s, self._counted = now_s, counted
        append_line(self._file, line)
        advice = [getattr(result, "advice", None) for result in results]
        if self._note is not None and any(each is not None for each in advice):
            self._note(number, [text for each in advice for text in each or ()])
        return line

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StepRecorder {os.fspath(self.path)!r}>"


def _took_s(future: Any) -> float:
    future.result()
    timeline = getattr(future, "timeline", None)
    return 0.0 if timeline is None or timeline.completed is None else timeline.completed - timeline.queued


def _metrics_of(result: Any, index: int) -> Mapping[str, Any]:
    done = result.result() if isinstance(result, Future) else result
    found = done if isinstance(done, Mapping) else getattr(done, "metrics", ...)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise InvalidInputError(
            f"log: results[{index}]: expected a future, a result with metrics or a mapping, "
            f"got {type(done).__name__}; give other values by name"
        )
    return found


def _plain(name: str, value: Any) -> Any:
    try:
        number = value.item() if hasattr(value, "item") else value
    except Exception as error:  # arrays of several values raise any class
        raise InvalidInputError(f"log: {name}: expected a single value: {error}") from error
    if isinstance(number, float) and not math.isfinite(number):
        return None  # JSON has no such number
    return number if isinstance(number, (bool, int, float, str, type(None))) else str(number)
