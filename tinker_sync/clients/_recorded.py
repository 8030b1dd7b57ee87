"""Models of a client with a journal: taken from the journal, restored from a checkpoint, or new.

Threads: the workers that create clients. `fetch_unread` runs on the user's thread.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from attrs import frozen

from tinker_sync.errors import ConflictError, JournalError
from tinker_sync.runtime.fetcher import Promise
from tinker_sync.types import (
    ForwardBackwardOutput,
    LoadWeightsRequest,
    LoadWeightsResponse,
    OptimStepResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerRequest,
    SaveWeightsForSamplerResponseInternal,
    SaveWeightsResponse,
    UnloadModelResponse,
)
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.endpoints import ENDPOINTS
from tinker_sync.wire.proto import outputs

if TYPE_CHECKING:
    from tinker_sync.journal.file import ModelHistory, Sent
    from tinker_sync.journal.record import TrainingRecord
    from tinker_sync.runtime.futures import APIFuture
    from tinker_sync.runtime.training_calls import TrainingLine

_RESULTS: Final[dict[str, type[Any]]] = {
    "forward_backward": ForwardBackwardOutput,
    "forward": ForwardBackwardOutput,
    "optim_step": OptimStepResponse,
    "save_weights": SaveWeightsResponse,
    "save_weights_for_sampler": SaveWeightsForSamplerResponseInternal,
    "save_weights_external": SaveWeightsExternalResponse,
    "load_weights": LoadWeightsResponse,
    "unload_model": UnloadModelResponse,
}

_log = logging.getLogger("tinker_sync.journal")


class ModelOrder(Protocol):
    """An order for a model: the request that creates the model, and the time at which to give up."""

    @property
    def request(self) -> Any: ...

    @property
    def deadline_at(self) -> float: ...


def make_recorded(line: TrainingLine, asked: ModelOrder, make: Callable[[TrainingLine], str]) -> None:
    """Give a training client its model, and record the model in the journal. Blocks.

    If the journal records the model for this session, take that one. Otherwise restore the model from the
    last checkpoint that the journal records. Without such a checkpoint, or for `recover`, call `make`.

    Args:
        line: the `TrainingLine` of the client.
        asked: the order for the model that the script makes.
        make: makes the model and returns the id of the request that made it.
    """
    record = _record_of(line)
    line.runtime.server.open_session(asked.deadline_at)
    digest = _digest_of(asked.request)
    history = record.open(digest)
    if history.model_id is not None:
        _take(line, history)
        return
    if history.start is None or record.after is not None:
        request_id = make(line)
    else:
        request_id = _restore(line, history.start[0], asked)
    record.note_model(line.model_id, request_id, digest)


@frozen
class RecordedModel:
    """An order for a model that a journal records, for `ServiceClient.attach`, which runs without the script.

    Attributes:
        model_seq_id: the number of the model in the session.
        deadline_at: the time of the clock at which to give up.
    """

    model_seq_id: int
    deadline_at: float

    @property
    def request(self) -> LoadWeightsRequest:
        """A request with an empty path, because each order has a request. It is never sent.

        `make` takes the path of the checkpoint from the journal.
        """
        return LoadWeightsRequest(path="", optimizer=True)

    def make(self, line: TrainingLine) -> None:
        """Take the model that the journal records, or restore it from its last checkpoint. Blocks.

        If the model still exists, also determine which requests without a recorded answer reached the server.

        Raises:
            JournalError: the model no longer exists, and the journal records no checkpoint of it.
        """
        record = _record_of(line)
        line.runtime.server.open_session(self.deadline_at)
        history = record.open(None)
        if history.model_id is not None:
            _take(line, history)
            for number in record.unsettled():
                self._settle(line, record, number)
        elif history.start is not None:
            request_id = _restore(line, history.start[0], self)
            record.note_model(line.model_id, request_id, history.digest or "")
        else:
            raise JournalError(
                f"model {self.model_seq_id} is gone, and the journal knows no checkpoint of it"
            )

    def _settle(self, line: TrainingLine, record: TrainingRecord, number: int) -> None:
        """Find out if the request `number` reached the server, and note the result in the record.

        Send a second request with the same number: the server refuses the second if the first has arrived.
        The second request saves weights for a sampler that stays unused, so it does not change the model.
        """
        runtime = line.runtime
        probe = SaveWeightsForSamplerRequest(
            model_id=line.model_id,
            sampling_session_seq_id=runtime.server.session.next_sampling_session_seq_id(),
            seq_id=number,
        )
        try:
            runtime.server.call("save_weights_for_sampler", probe)
        except ConflictError:
            record.settle(number, arrived=True)
        else:
            record.settle(number, arrived=False)


def fetch_unread(line: TrainingLine, deadline_at: float) -> Iterator[APIFuture[Any]]:
    """Yield a future for each accepted request whose result had not arrived when the earlier run ended."""
    record = _record_of(line)
    for sent in record.unread:
        future = line.runtime.lifecycle.make_future()
        future._mark_accepted(sent.request_id or "")
        line.runtime.server.ready().fetcher.fetch(
            Promise(sent.request_id or "", ENDPOINTS[sent.call].promises or sent.call),
            future,
            _reader_of(sent),
            deadline_at=deadline_at,
        )
        record.follow(sent, future)
        yield future


def _reader_of(sent: Sent) -> Callable[[Any, Any], Any]:
    kind = _RESULTS[sent.call]

    def read(reply: Any, tree: Any) -> Any:
        if tree is None:
            return outputs.decode_forward_backward_output(reply.body)
        return wire_json.from_plain(tree, kind)

    return read


def _take(line: TrainingLine, history: ModelHistory) -> None:
    """Set the model of a client, and the state that `recover` loads, to those of the journal."""
    assert history.model_id is not None  # noqa: S101  # the callers have checked this
    line.model_id = history.model_id
    if history.last_path is not None:
        line.last_state = LoadWeightsRequest(path=history.last_path, optimizer=True)


def _restore(line: TrainingLine, path: str, asked: ModelOrder) -> str:
    from tinker_sync.clients._models import LoadedModel

    load = LoadWeightsRequest(path=path, optimizer=True, user_metadata=asked.request.user_metadata)
    return LoadedModel(load, _record_of(line).model_seq_id, asked.deadline_at).load(line)


def _record_of(line: TrainingLine) -> TrainingRecord:
    record = line.record
    if record is None:
        raise JournalError("this client has no journal; give ServiceClient one, or use ServiceClient.attach")
    return record


def _digest_of(request: Any) -> str:
    """Return a digest of a request without the session and without the access token."""
    plain = request.model_copy(update={"session_id": ""})
    if isinstance(plain, LoadWeightsRequest):
        plain = plain.model_copy(update={"weights_access_token": None})
    return hashlib.sha256(wire_json.encode(plain)).hexdigest()[:32]
