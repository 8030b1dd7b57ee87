"""`LoopCheckpoints`: saves a training loop, keeps the latest and best saves, and resumes the loop."""

from __future__ import annotations

import math
import operator
import os
from pathlib import Path
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from attrs import asdict, fields_dict, frozen

from tinker_sync._base.jsonl import append_line, read_lines
from tinker_sync._base.log import Log
from tinker_sync.errors import InvalidInputError, NotFoundError, TinkerError
from tinker_sync.types._checks import as_whole

FILE_NAME: Final = "checkpoints.jsonl"

ClientT = TypeVar("ClientT")
"""The class of the training client, which this module does not import."""

_log = Log("tinker_sync.loop")


class CheckpointService(Protocol):
    """The part of a service client that checkpoints use."""

    def create_training_client_from_state_with_optimizer(
        self, path: str, base_model: str | None = None, user_metadata: dict[str, str] | None = None
    ) -> Any:
        """Return a training client for a checkpoint."""

    def create_rest_client(self) -> Any:
        """Return a client that deletes checkpoints."""


@frozen
class SavedStep:
    """A checkpoint of a loop: the number of its step, its path, and its score.

    >>> SavedStep(3, "tinker://run/weights/step-3", score=0.5).step
    3
    """

    step: int
    path: str
    score: float | None = None
    parent: str | None = None
    """The path of the checkpoint from which its run was resumed; None if it was not resumed."""


class LoopCheckpoints(Generic[ClientT]):
    """The checkpoints of a training loop. One thread at a time may use the object.

    A save is written to `checkpoints.jsonl` when the server has acknowledged it. Then the checkpoints of this
    file that are neither among the latest nor the best are deleted. `ServiceClient.checkpoints` makes the
    object.

    Args:
        service: makes clients from checkpoints.
        directory: the directory of the run.
        every: the number of steps between two saves.
        keep_last: the number of latest checkpoints to keep.
        best: also keep the checkpoint with the lowest ("min") or highest ("max") score of `after_step`.

    Raises:
        InvalidInputError: an argument is out of its range.
    """

    def __init__(
        self,
        service: CheckpointService,
        directory: str | os.PathLike[str],
        *,
        every: int = 100,
        keep_last: int = 3,
        best: Literal["min", "max"] = "min",
    ) -> None:
        for name, value in (("every", every), ("keep_last", keep_last)):
            if (as_whole(value) or 0) < 1:
                raise InvalidInputError(f"checkpoints: {name}: expected 1 or more, got {value!r}")
        if best not in ("min", "max"):
            raise InvalidInputError(f"checkpoints: best: expected 'min' or 'max', got {best!r}")
        self.path = Path(directory) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._service, self._every, self._keep_last, self._best = service, every, keep_last, best
        self._kept = _read(self.path)
        self._parent: str | None = None

    @property
    def kept(self) -> list[SavedStep]:
        """The checkpoints that are kept, the latest last."""
        return list(self._kept)

    @property
    def latest(self) -> SavedStep | None:
        """The latest checkpoint; None before the first."""
        return self._kept[-1] if self._kept else None

    @property
    def best(self) -> SavedStep | None:
        """The checkpoint with the best score; None if no checkpoint has a score other than NaN."""
        scored = [each for each in self._kept if each.score is not None and not math.isnan(each.score)]
        choose = min if self._best == "min" else max
        return choose(scored, key=lambda each: each.score or 0.0) if scored else None

    def resume(self) -> tuple[ClientT, int] | None:
        """Return a client of the latest checkpoint and the next step, or None before the first save.

        The metadata of the new run contain the path of the checkpoint (`parent`) and its step.
        """
        latest = self.latest
        if latest is None:
            return None
        metadata = {"parent": latest.path, "step": str(latest.step)}
        training: ClientT = self._service.create_training_client_from_state_with_optimizer(
            latest.path, user_metadata=metadata
        )
        self._parent = latest.path
        return training, latest.step + 1

    def after_step(self, training: ClientT, step: int, *, score: float | None = None) -> SavedStep | None:
        """Save if the number of ended steps is a multiple of `every`; return the checkpoint, or None.

        Args:
            training: the client of the loop.
            step: the number of the step that has just ended, from 0.
            score: the value that selects the best checkpoint, such as a loss on held-out data.

        Raises:
            InvalidInputError: the score is no number; nothing was saved.
        """
        return self.save(training, step, score=score) if (step + 1) % self._every == 0 else None

    def save(self, training: ClientT, step: int, *, score: float | None = None) -> SavedStep:
        """Save now, wait for the server, delete surplus checkpoints, and return the new one.

        The arguments are those of `after_step`. A checkpoint that cannot be deleted stays, with a warning in
        the log.

        Raises:
            InvalidInputError: an argument is no number; nothing was saved.
        """
        try:
            step, score = operator.index(step), None if score is None else float(score)
        except (TypeError, ValueError):
            raise InvalidInputError(
                f"save: expected a whole number as step and a number as score, got {step=}, {score=}"
            ) from None
        client: Any = training
        path = client.save_state(f"step-{step}", overwrite=True).result().path
        saved = SavedStep(step, path, score, self._parent)
        self._write({"saved": asdict(saved)})
        self._kept = [each for each in self._kept if each.path != path] + [saved]
        self._prune()
        return saved

    def _prune(self) -> None:
        keep = {each.path for each in self._kept[-self._keep_last :]}
        if self.best is not None:
            keep.add(self.best.path)
        for each in [each for each in self._kept if each.path not in keep]:
            try:
                self._service.create_rest_client().delete_checkpoint_from_tinker_path(each.path).result()
            except NotFoundError:
                pass  # it has expired, or is deleted already
            except TinkerError as error:
                _log.warning("%s stays, because it cannot be deleted: %s", each.path, error)
                continue
            self._write({"deleted": each.path})
            self._kept.remove(each)

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a+b", buffering=0) as file:
            append_line(file, line)

    def __repr__(self) -> str:
        return f"<LoopCheckpoints {os.fspath(self.path)!r}, {len(self._kept)} kept>"


def _read(path: Path) -> list[SavedStep]:
    kept: dict[str, SavedStep] = {}
    known = fields_dict(SavedStep).keys()
    for number, line in read_lines(path) if path.exists() else ():
        saved = line.get("saved") if isinstance(line, dict) else line
        if isinstance(saved, dict) and type(saved.get("step")) is int and isinstance(saved.get("path"), str):
            kept.pop(saved["path"], None)
            kept[saved["path"]] = SavedStep(**{name: saved[name] for name in known & saved.keys()})
        elif isinstance(line, dict) and isinstance(line.get("deleted"), str):
            kept.pop(line["deleted"], None)
        else:
            _log.warning("line %d of %s is no record of a checkpoint; it is left out", number, path)
    return list(kept.values())
