"""`LoopCheckpoints`: saves a training loop, keeps the latest and best saves alive, and resumes the loop."""

from __future__ import annotations

import math
import operator
import os
import re
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Protocol, TypeVar

from attrs import asdict, fields_dict, frozen

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.jsonl import append_line, read_lines
from tinker_sync._base.log import Log
from tinker_sync.errors import InvalidInputError, NotFoundError, TinkerError
from tinker_sync.types._checks import as_whole

if TYPE_CHECKING:
    from tinker_sync.types import Checkpoint

FILE_NAME: Final = "checkpoints.jsonl"

# A checkpoint that lives for less than this is worth a warning.
_SOON_S: Final = 86_400.0
# The lists of the server are read at most this often.
_LOOK_S: Final = 600.0
_PART: Final = re.compile(r"\s*(best|last|every)\s+(\d+)\s*")

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


class CorruptedRunError(TinkerError):
    """The server has lost part of the state of a run, so what was just saved is not kept.

    >>> print(CorruptedRunError("run-1", "tinker://run-0/weights/step-99"))
    the server reports that run run-1 is corrupted; the last good save is tinker://run-0/weights/step-99
    """

    def __init__(self, run: str, last_good: str | None) -> None:
        super().__init__(run, last_good)
        self.run = run
        """The id of the run."""
        self.last_good = last_good
        """The path of the latest save before; None if there is none."""

    def __str__(self) -> str:
        last = (
            "there is no earlier save"
            if self.last_good is None
            else f"the last good save is {self.last_good}"
        )
        return f"the server reports that run {self.run} is corrupted; {last}"


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
    file that are not to be kept are deleted. A save of a run that the server calls corrupted is not kept. At
    most every ten minutes, a save looks up when the kept checkpoints expire, and warns of those with less
    than a day to live, or renews them. `ServiceClient.checkpoints` makes the object.

    Args:
        service: makes clients from checkpoints.
        directory: the directory of the run.
        every: the number of steps between two saves.
        keep_last: the number of latest checkpoints to keep; None: 3.
        best: the best score of `after_step` is the lowest ("min") or the highest ("max").
        keep: in place of `keep_last`, which checkpoints are kept, such as "best 3, last 2, every 100": those
            with the three best scores, the two latest, and each whose number of ended steps is a multiple of
            100. The latest one is always kept. None: "best 1" and `keep_last`.
        ttl_seconds: the lifetime of a save; kept ones are renewed when half of it has passed. None: the
            server's default, and no renewal.
        clock: the time by which checkpoints expire.

    Raises:
        InvalidInputError: an argument is out of its range.
    """

    def __init__(
        self,
        service: CheckpointService,
        directory: str | os.PathLike[str],
        *,
        every: int = 100,
        keep_last: int | None = None,
        best: Literal["min", "max"] = "min",
        keep: str | None = None,
        ttl_seconds: int | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        for name, value in (("every", every), ("keep_last", keep_last), ("ttl_seconds", ttl_seconds)):
            if (as_whole(value) or 0) < 1 and (value is not None or name == "every"):
                raise InvalidInputError(f"checkpoints: {name}: expected 1 or more, got {value!r}")
        if keep is not None and keep_last is not None:
            raise InvalidInputError(
                f"checkpoints: give keep or keep_last; keep has 'last {keep_last}' for it"
            )
        if best not in ("min", "max"):
            raise InvalidInputError(f"checkpoints: best: expected 'min' or 'max', got {best!r}")
        self.path = Path(directory) / FILE_NAME
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._service, self._every, self._best = service, every, best
        self._keep = _read_keep(keep, every) if keep is not None else _Keep(1, keep_last or 3, None)
        self._ttl_s, self._clock = ttl_seconds, clock
        self._looked_s = -math.inf
        # The paths of which the log has a warning already.
        self._warned: set[str] = set()
        self._undeleted: set[str] = set()
        self._kept = _read(self.path)
        self._parent: str | None = None
        self._run: str | None = None

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
        ranked = self._rank()
        return ranked[0] if ranked else None

    def _rank(self) -> list[SavedStep]:
        """Return the checkpoints with a score, the best first; among equal ones, the earlier first."""
        scored = [each for each in self._kept if each.score is not None and not math.isnan(each.score)]
        sign = 1 if self._best == "min" else -1
        return sorted(scored, key=lambda each: sign * (each.score or 0.0))

    def resume(self) -> tuple[ClientT, int] | None:
        """Return a client of the latest checkpoint and the next step, or None before the first save. Blocks.

        A checkpoint that the server no longer has, because it expired or was deleted, is left out with a
        warning, and the one before it is taken. The metadata of the new run contain the path of the
        checkpoint (`parent`) and its step.

        Raises:
            NotFoundError: there were saves, and the server has none of them any more.
        """
        self._look_after()
        missing: list[SavedStep] = []
        latest: NotFoundError | None = None
        for saved in reversed(self.kept):
            metadata = {"parent": saved.path, "step": str(saved.step)}
            made = self._service.create_training_client_from_state_with_optimizer(
                saved.path, user_metadata=metadata
            )
            try:
                training: ClientT = made.result()
            except NotFoundError as error:
                latest = latest or error
                missing.append(saved)
                continue
            # Only now: a server that has none of them may be another one, where the loop is by mistake.
            for each in missing:
                _log.warning("%s cannot be resumed from, because the server does not have it", each.path)
                self._write({"deleted": each.path})
                self._kept.remove(each)
            self._parent, self._run = saved.path, made.model_id
            return training, saved.step + 1
        if latest is not None:
            raise latest
        return None

    def after_step(self, training: ClientT, step: int, *, score: float | None = None) -> SavedStep | None:
        """Save if the number of ended steps is a multiple of `every`; return the checkpoint, or None.

        Args:
            training: the client of the loop.
            step: the number of the step that has just ended, from 0.
            score: the value that selects the best checkpoint, such as a loss on held-out data.

        Raises:
            InvalidInputError: the step or the score is no number, also if this step is not saved.
        """
        step, score = _check_numbers(step, score)
        return self.save(training, step, score=score) if (step + 1) % self._every == 0 else None

    def save(self, training: ClientT, step: int, *, score: float | None = None) -> SavedStep:
        """Save now, wait for the server, delete surplus checkpoints, and return the new one.

        The arguments are those of `after_step`. A checkpoint that cannot be deleted stays, with a warning in
        the log.

        Raises:
            InvalidInputError: an argument is no number; nothing was saved.
            CorruptedRunError: the server has lost part of the state of the run; the save is not kept.
        """
        step, score = _check_numbers(step, score)
        client: Any = training
        options = {} if self._ttl_s is None else {"ttl_seconds": self._ttl_s}
        path = client.save_state(f"step-{step}", overwrite=True, **options).result().path
        self._run = client.model_id
        if self.is_corrupted:
            self._kept = [each for each in self._kept if each.path != path]
            self._write({"deleted": path})
            self._delete(path)
            raise CorruptedRunError(client.model_id, None if self.latest is None else self.latest.path)
        saved = SavedStep(step, path, score, self._parent)
        self._write({"saved": asdict(saved)})
        self._kept = [each for each in self._kept if each.path != path] + [saved]
        self._prune()
        self._look_after()
        return saved

    @property
    def is_corrupted(self) -> bool:
        """True if the server has lost part of the state of the run that was resumed or saved last.

        The property asks the server. It is False if the server does not say.
        """
        if self._run is None:
            return False
        try:
            found = self._service.create_rest_client().get_training_run(self._run).result()
        except TinkerError:  # the state is not known; many servers have no such call
            return False
        return bool(found.corrupted)

    def _prune(self) -> None:
        keep = {each.path for each in self._keep.choose(self._kept, self._rank())}
        for each in [each for each in self._kept if each.path not in keep]:
            if self._delete(each.path):
                self._write({"deleted": each.path})
                self._kept.remove(each)

    def _delete(self, path: str) -> bool:
        try:
            self._service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
        except NotFoundError:
            pass  # it has expired, or is deleted already
        except TinkerError as error:
            if path not in self._undeleted:  # each save tries again
                self._undeleted.add(path)
                _log.warning("%s stays, because it cannot be deleted: %s", path, error)
            return False
        return True

    # ---------------------------------------------------------------------------------- expiry

    def expiring(self, within_s: float = _SOON_S) -> list[Checkpoint]:
        """Return those of the kept checkpoints that expire within some seconds, as the server lists them.

        Raises:
            TinkerError: the server has no list of checkpoints.

        >>> import tempfile, tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service, tempfile.TemporaryDirectory() as to:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     saves = service.checkpoints(f"{to}/runs/x", ttl_seconds=3600)
        ...     saved = saves.save(training, 0)
        ...     before = [each.tinker_path == saved.path for each in saves.expiring()]
        ...     saves.extend(7 * 86400)
        ...     before, saves.expiring()
        ([True], [])
        """
        paths = {each.path for each in self._kept}
        until = self._clock.time() + within_s
        rest = self._service.create_rest_client()
        runs = dict.fromkeys(path.removeprefix("tinker://").partition("/")[0] for path in paths)
        return [
            each
            for run in runs
            for each in _list_run(rest, run)
            if each.tinker_path in paths
            and each.expires_at is not None
            and each.expires_at.timestamp() < until
        ]

    def extend(self, ttl_seconds: int | None, paths: Iterable[str] | None = None) -> None:
        """Let the kept checkpoints live for some seconds from now on; None: without an end.

        Args:
            ttl_seconds: the new lifetime.
            paths: those to extend; None: all that are kept.

        Raises:
            TinkerError: one could not be extended; the others were.
        """
        wanted = [each.path for each in self._kept] if paths is None else list(paths)
        for outcome in self._service.create_rest_client().set_checkpoints_ttl(wanted, ttl_seconds).result():
            if outcome.error is not None and not isinstance(outcome.error, NotFoundError):
                raise outcome.error

    def _look_after(self) -> None:
        """Renew the kept checkpoints, or warn of those that expire soon. Failures are logged."""
        now_s = self._clock.now()
        if not self._kept or now_s - self._looked_s < min(_LOOK_S, (self._ttl_s or _LOOK_S) / 4):
            return
        self._looked_s = now_s
        try:
            soon = self.expiring(_SOON_S if self._ttl_s is None else self._ttl_s / 2)
            if soon and self._ttl_s is not None:
                self.extend(self._ttl_s, [each.tinker_path for each in soon])
                return
        except TinkerError as error:
            _log.debug("it is not known when checkpoints expire: %s", error)
            return
        for each in soon:
            if each.tinker_path not in self._warned and each.expires_at is not None:
                self._warned.add(each.tinker_path)
                left = timedelta(seconds=round(each.expires_at.timestamp() - self._clock.time()))
                _log.warning(
                    "%s expires in %s; extend() keeps it, ttl_seconds= renews what is kept",
                    each.tinker_path,
                    left,
                )

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a+b", buffering=0) as file:
            append_line(file, line)

    def __repr__(self) -> str:
        return f"<LoopCheckpoints {os.fspath(self.path)!r}, {len(self._kept)} kept>"


def _check_numbers(step: Any, score: Any) -> tuple[int, float | None]:
    try:
        return operator.index(step), None if score is None else float(score)
    except (TypeError, ValueError):
        raise InvalidInputError(
            f"checkpoints: expected a whole number as step and a number as score, got {step=}, {score=}"
        ) from None


def _list_run(rest: Any, run: str) -> list[Checkpoint]:
    try:
        found: list[Checkpoint] = rest.list_checkpoints(run).result().checkpoints
    except NotFoundError:  # the run is gone, with its checkpoints
        return []
    return found


@frozen
class _Keep:
    """Which checkpoints are kept: the best, the last, and those after a multiple of some steps."""

    best: int
    last: int
    every: int | None

    def choose(self, kept: list[SavedStep], ranked: list[SavedStep]) -> list[SavedStep]:
        periodic = [each for each in kept if self.every is not None and (each.step + 1) % self.every == 0]
        return [*kept[-self.last :], *ranked[: self.best], *periodic]


def _read_keep(text: str, every: int) -> _Keep:
    """Parse a rule such as "best 3, last 2, every 100".

    >>> _read_keep("last 2, every 200", 100)
    _Keep(best=0, last=2, every=200)
    """
    found: dict[str, int] = {}
    for part in str(text).split(","):
        match = _PART.fullmatch(part)
        if match is None or match[1] in found or int(match[2]) < 1:
            raise InvalidInputError(
                f"checkpoints: keep: expected parts such as 'best 3, last 2, every 100', got {part.strip()!r}"
            )
        found[match[1]] = int(match[2])
    if found.get("every", 0) % every:
        raise InvalidInputError(
            f"checkpoints: keep: 'every {found['every']}' is no multiple of {every}, the steps between saves"
        )
    return _Keep(found.get("best", 0), found.get("last", 1), found.get("every"))


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
