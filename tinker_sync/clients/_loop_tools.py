"""The methods of a service client for a training loop: recordings of its time, checkpoints, metrics."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from tinker_sync.clients._factory import ClientFactory
from tinker_sync.clients._spending import SpendingCalls

if TYPE_CHECKING:
    from tinker_sync.clients.training import TrainingClient
    from tinker_sync.insight.recording import Recording
    from tinker_sync.loop.checkpoints import LoopCheckpoints
    from tinker_sync.loop.recorder import StepRecorder


class LoopTools(ClientFactory, SpendingCalls):
    """The part of a service client that times a training loop, saves it, and writes its metrics to a file."""

    _recordings: list[Recording]

    def explain(self) -> Recording:
        """Start and return a recording of the time that calls take. `str(recording)` is an explanation.

        The explanation shows, for each method, the time in the queue, on the wire, at the server and in
        decoding. It also lists retries and pauses, and suggests changes. The recording goes on until it or
        this client is closed.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service, service.explain() as recording:
        ...     sampling = service.create_sampling_client(base_model="tinker-sync/tiny")
        ...     prompt = tinker_sync.ModelInput.from_ints([1, 2])
        ...     sampled = sampling.sample(prompt, 1, tinker_sync.SamplingParams(max_tokens=3)).result()
        >>> "SamplingClient.sample" in str(recording)
        True
        """
        return self._record(None)

    def trace(self, path: str | os.PathLike[str]) -> Recording:
        """Start a recording as `explain` does. Closing the recording, or this client, writes the trace.

        Args:
            path: the file of the trace, for https://ui.perfetto.dev and chrome://tracing.

        >>> import json, pathlib, tempfile, tinker_sync
        >>> file = pathlib.Path(tempfile.mkdtemp(), "t.json")
        >>> with tinker_sync.ServiceClient(base_url="local") as service, service.trace(file):
        ...     models = service.create_rest_client().get_server_capabilities().result()
        >>> len(json.loads(file.read_text())["traceEvents"]) > 3
        True
        """
        return self._record(path)

    def _record(self, path: str | os.PathLike[str] | None) -> Recording:
        from tinker_sync.insight.recording import Recording

        self._runtime.lifecycle.refuse_if_leaving()
        recording = Recording(self._runtime, path)
        self._recordings.append(recording)
        return recording

    def checkpoints(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int = 100,
        keep_last: int = 3,
        best: Literal["min", "max"] = "min",
    ) -> LoopCheckpoints[TrainingClient]:
        """Return an object that saves a training loop at intervals and resumes it from the latest save.

        Args:
            directory: the directory of the run; ``checkpoints.jsonl`` in it lists the checkpoints.
            every: the number of steps between two saves.
            keep_last: the number of latest checkpoints to keep; older ones are deleted, except for the best.
            best: also keep the checkpoint with the lowest ("min") or highest ("max") `score` of
                `after_step`.

        Raises:
            InvalidInputError: an argument is out of its range.

        >>> import tempfile, tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service, tempfile.TemporaryDirectory() as to:
        ...     saves = service.checkpoints(f"{to}/runs/x", every=2)
        ...     resumed = saves.resume()  # in a later process: the client of the latest, and the next step
        ...     training, first = resumed or (service.create_lora_training_client("tinker-sync/tiny"), 0)
        ...     for step in range(first, 4):
        ...         stepped = training.optim_step(tinker_sync.AdamParams(learning_rate=1e-4)).result()
        ...         saved = saves.after_step(training, step, score=1.0 / (step + 1))
        ...     [each.step for each in saves.kept]
        [1, 3]
        """
        from tinker_sync.loop.checkpoints import LoopCheckpoints

        return LoopCheckpoints(self, directory, every=every, keep_last=keep_last, best=best)

    def recorder(self, directory: str | os.PathLike[str]) -> StepRecorder:
        """Return a recorder that writes a line of JSON to ``metrics.jsonl`` for each step of a training loop.

        Each line has metrics, timings and the tokens used. `tinker-sync plot DIRECTORY` draws the curves.

        Args:
            directory: the directory of the run, such as "runs/x"; new lines are appended to an existing run.

        >>> import tempfile, tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service, tempfile.TemporaryDirectory() as to:
        ...     with service.recorder(f"{to}/runs/x") as recorder:
        ...         line = recorder.log(0, {"loss": 2.0}, reward=0.5)
        ...     recorder.path.name, line["loss"], line["reward"]
        ('metrics.jsonl', 2.0, 0.5)
        """
        from tinker_sync.loop.recorder import StepRecorder

        return StepRecorder(directory, lambda: self.usage().tokens, clock=self._runtime.clock)
