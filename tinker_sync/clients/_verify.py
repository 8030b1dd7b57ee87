"""The verification that a checkpoint restores the saved weights and the saved state of the optimizer.

The loss of a small fixed batch, the probe, stands for the weights. It is computed before the save, and again
in a copy that the server restores from the checkpoint. If both losses are equal within a tolerance, the
server has restored the weights.

A server shows no state of its optimizer. So the copy takes a step whose gradients are all zero. A restored
optimizer still moves the weights by its mean of earlier gradients. A new optimizer has no such mean, and the
loss of the probe stays the same.

The model that was saved only computes a forward pass of the probe, so its weights, its gradients and its
optimizer do not change. The cost is a pass of 16 tokens before the save; then a restore, three such passes
and one step in the copy, which takes a place at the server until it is unloaded.

Threads: the user's thread measures before the save; a worker that may block restores the copy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from tinker_sync.clients import _deadlines
from tinker_sync.clients._models import LoadedModel, reading
from tinker_sync.errors import (
    ClientClosedError,
    InvalidInputError,
    TinkerError,
    UnsupportedByServerError,
    VerificationError,
)
from tinker_sync.runtime.naming import find_call_site, log_if_unread
from tinker_sync.types import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    LoadWeightsRequest,
    ModelInput,
    OptimParamsBase,
)

if TYPE_CHECKING:
    from tinker_sync.clients._passes import PassCalls
    from tinker_sync.clients.training import TrainingClient
    from tinker_sync.runtime.client_runtime import ClientRuntime
    from tinker_sync.runtime.futures import APIFuture
    from tinker_sync.runtime.training_calls import TrainingLine
    from tinker_sync.types import OptimParams, SaveWeightsResponse

TOLERANCE: Final = 1e-3
"""The relative difference that is allowed between two computations of the same loss."""
_LENGTH: Final = 16
_LOSS: Final = "cross_entropy"
# Far above usual rates, so that a step by the mean of earlier gradients shows in the loss. The copy is lost
# anyway.
_RATE: Final = 1e-2
_NAME: Final = "tinker_sync_probe"

_log = logging.getLogger("tinker_sync.session")


def _probe(weight: float) -> list[Datum]:
    tokens = ModelInput.from_ints(range(1, _LENGTH + 1))
    targets = list(range(2, _LENGTH + 2))
    return [Datum(tokens, {"target_tokens": targets, "weights": [weight] * _LENGTH})]


@frozen
class Measured:
    """The loss and the optimizer settings of a model, as measured before its save.

    Attributes:
        loss: the loss of a small fixed batch, the probe.
        step: the settings of a step that the server accepts; None if the model has taken no step with
            gradients, so that its optimizer may be new.
        tolerance: the allowed relative difference of losses.
    """

    loss: float
    step: OptimParams | None
    tolerance: float = TOLERANCE

    def metadata(self) -> dict[str, str]:
        """Return the loss, and the kind and settings of a step, as metadata of a checkpoint.

        The settings of Adam are left out.

        >>> Measured(2.5, None).metadata()
        {'tinker_sync_probe': '2.5 new'}
        """
        trained = self.step.model_dump_json() if isinstance(self.step, OptimParamsBase) else "trained"
        return {_NAME: f"{self.loss!r} {'new' if self.step is None else trained}"}

    @classmethod
    def of(cls, metadata: Mapping[str, str] | None, tolerance: float) -> Measured | None:
        """Return the values that `Measured.metadata` gave to a checkpoint; None if they cannot be read.

        A model that has taken a step of Adam gets the default settings.

        >>> Measured.of({"tinker_sync_probe": "2.5 trained"}, 0.1).loss, Measured.of({}, 0.1)
        (2.5, None)
        """
        loss, _, state = (metadata or {}).get(_NAME, "").partition(" ")
        try:
            other = OptimParamsBase.model_validate_json(state) if state.startswith("{") else None
            return cls(float(loss), AdamParams() if state == "trained" else other, tolerance)
        except ValueError:
            return None


@frozen
class VerifiedModel:
    """An order for a model from a checkpoint that is verified first, in a copy.

    Attributes:
        asked: the order without the verification.
        tolerance: the allowed relative difference of losses.
    """

    asked: LoadedModel
    tolerance: float

    @property
    def request(self) -> LoadWeightsRequest:
        """The request for the model."""
        return self.asked.request

    @property
    def model_seq_id(self) -> int:
        """The number of the model in its session."""
        return self.asked.model_seq_id

    def make(self, line: TrainingLine) -> None:
        """Verify the checkpoint, then create the model and set its id in `line`. Blocks.

        Raises:
            VerificationError: the server does not restore the saved weights or optimizer state, or the
                metadata of the checkpoint have no loss.
        """
        measured = recorded(line.runtime, self.request, self.tolerance)
        prove(line.runtime, self.request, measured, self.asked.deadline_at)
        self.asked.make(line)


def tolerance_of(verify: object, call: str) -> float:
    """Return the tolerance that an argument `verify` asks for.

    Raises:
        InvalidInputError: `verify` is neither True nor a number between 0 and 1.
    """
    if verify is True:
        return TOLERANCE
    if isinstance(verify, (int, float)) and 0 < verify < 1:
        return float(verify)
    raise InvalidInputError(
        f"{call}: verify: expected True, False, or a tolerance between 0 and 1, got {verify!r}"
    )


def measure(
    training: PassCalls[Any], step: OptimParams | None, tolerance: float, deadline: float | None
) -> Measured:
    """Return the loss and the settings of a model that is about to be saved. Blocks.

    Raises:
        UnsupportedByServerError: the server computes no loss; nothing was saved.
    """
    passed = training.forward(_probe(1.0), _LOSS, deadline=deadline).result()
    return Measured(_loss_of(passed, "nothing was saved"), step, tolerance)


def follow(
    training: PassCalls[Any], saved: APIFuture[SaveWeightsResponse], measured: Measured, deadline_at: float
) -> APIFuture[SaveWeightsResponse]:
    """Return a future that gets the result of a save when the checkpoint has been verified.

    A failure of the save is one of that future, and is logged for it alone. A checkpoint that the end of the
    client leaves without its verification is logged.
    """
    runtime = training.holder
    verified: APIFuture[SaveWeightsResponse] = runtime.lifecycle.make_future()
    saved._note_look()
    log_if_unread(verified, find_call_site())

    def verify() -> None:
        try:
            answer = saved.result()
            prove(runtime, LoadWeightsRequest(path=answer.path, optimizer=True), measured, deadline_at)
        except BaseException as failure:  # noqa: BLE001  # raised where the future is read
            verified.fail(failure)
        else:
            verified.resolve(answer)

    def go_on(ended: APIFuture[SaveWeightsResponse]) -> None:
        if ended.cancelled() or ended.failure is not None:
            verified.fail(ended.failure or TinkerError("the save was cancelled"))
            return
        try:
            runtime.lifecycle.refuse_if_leaving()
            runtime.pools.awaited.run_call(verify)
        except TinkerError as closed:
            verified.fail(closed)

    def end(ended: APIFuture[SaveWeightsResponse]) -> None:
        if ended.cancelled():
            saved.cancel()
        elif isinstance(ended.failure, ClientClosedError) and saved.done() and saved.failure is None:
            path = saved.result(timeout=0).path
            _log.warning("%s is saved, but not verified: the client was closed before", path)

    saved._when_done(go_on)
    verified._when_done(end)
    return verified


def recorded(runtime: ClientRuntime, load: LoadWeightsRequest, tolerance: float) -> Measured:
    """Return the loss and settings that a verified save has stored with its checkpoint. Blocks.

    The checkpoints are listed with the key that may read them.

    Raises:
        VerificationError: the checkpoint has no such metadata.
    """
    from tinker_sync.clients.rest import RestClient

    path = load.path
    run = path.removeprefix("tinker://").partition("/")[0]
    with reading(runtime, load.weights_access_token) as reader:
        checkpoints = RestClient(reader).list_checkpoints(run).result().checkpoints
    for listed in checkpoints:
        measured = Measured.of(listed.user_metadata, tolerance)
        if listed.tinker_path == path and measured is not None:
            return measured
    raise VerificationError(
        f"{path} cannot be verified: it was saved without save_state(verify=True), or the server keeps no "
        "metadata; restore it without verify"
    )


def prove(runtime: ClientRuntime, load: LoadWeightsRequest, measured: Measured, deadline_at: float) -> None:
    """Load a checkpoint into a second model, and compare that model with `measured`. Blocks.

    Raises:
        VerificationError: the weights differ, or the state of the optimizer was not restored.
    """
    with_copy(runtime, load, deadline_at, partial(_compare, load.path, measured, deadline_at))


def with_copy(
    runtime: ClientRuntime,
    load: LoadWeightsRequest,
    deadline_at: float,
    work: Callable[[TrainingClient], Any],
) -> None:
    """Restore a checkpoint into a new model, call `work` with its client, and unload the model. Blocks."""
    from tinker_sync.clients.training import TrainingClient

    number = runtime.server.session.next_model_seq_id()
    copy = TrainingClient(runtime, number)
    LoadedModel(load, number, deadline_at).make(copy._line)
    copy._become_ready()
    try:
        work(copy)
    finally:
        with suppress(TinkerError, TimeoutError):  # the server frees the place with the session
            unloaded = copy.unload(deadline=_deadlines.REST_S)
            unloaded.result(max(deadline_at - runtime.clock.now(), 0.0))


def _compare(path: str, measured: Measured, deadline_at: float, copy: TrainingClient) -> None:
    left_s = deadline_at - copy.holder.clock.now()
    before = copy.forward(_probe(1.0), _LOSS, deadline=left_s)
    still: tuple[Any, ...] = ()
    after = None
    if measured.step is not None:
        still = (
            copy.forward_backward(_probe(0.0), _LOSS, deadline=left_s),
            copy.optim_step(_fast(measured.step), deadline=left_s),
        )
        after = copy.forward(_probe(1.0), _LOSS, deadline=left_s)
    for each in filter(None, (before, *still, after)):
        each._note_look()  # this function raises the first failure; the others follow from it
    loss = _loss_of(before.result(), f"{path} is saved, but not verified")
    if _differ(loss, measured.loss, measured.tolerance):
        raise VerificationError(
            f"{path} does not restore the weights that were saved: the loss of a probe was "
            f"{measured.loss:.6g} before the save, and is {loss:.6g} in the restored model"
        )
    if after is None:
        return
    for each in still:
        each.result()
    moved = _loss_of(after.result(), f"{path} is saved, but its optimizer is not verified")
    if not _differ(moved, loss, measured.tolerance):
        raise VerificationError(
            f"{path} restores the weights, but with a new optimizer: a step without gradients leaves the "
            f"loss of a probe at {moved:.6g}. The server has not kept the optimizer state, or all gradients "
            "before the save were zero"
        )


def _fast(step: OptimParams) -> OptimParams:
    """Return the settings for the step of the copy; for Adam, with a rate that changes the loss visibly."""
    return AdamParams(learning_rate=_RATE) if isinstance(step, AdamParams) else step


def _differ(one: float, other: float, tolerance: float) -> bool:
    return not abs(one - other) <= tolerance * max(abs(one), abs(other))


def _loss_of(passed: ForwardBackwardOutput, state: str) -> float:
    """Return the loss of the probe, from its log-probabilities, else from the metrics.

    Raises:
        UnsupportedByServerError: the server returned neither, or the loss is not finite.
    """
    first = passed.loss_fn_outputs[0] if passed.loss_fn_outputs else {}
    if "logprobs" in first:
        loss = -math.fsum(float(value) for value in first["logprobs"].data)
    else:
        loss = passed.metrics.get("loss:sum", math.nan)
    if not math.isfinite(loss):
        raise UnsupportedByServerError(
            f"verify: this server returned no usable loss of a forward pass, and {state}", feature="verify"
        )
    return loss
