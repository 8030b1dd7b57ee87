"""What the lines of a journal say: sessions, their models, and the calls that were sent. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import Factory, define


@define
class Sent:
    """One request of a training client.

    Attributes:
        number: its sequence number.
        call: the name of the endpoint.
        digest: of the request as it was sent.
        step: of `TrainingClient.steps` it belongs to.
        request_id: the server's name for it; None where no answer was recorded.
        arrived: whether its result has arrived.
        path: of the checkpoint that it made.
    """

    number: int
    call: str
    digest: str
    step: int | None = None
    request_id: str | None = None
    arrived: bool = False
    path: str | None = None


@define
class ModelHistory:
    """One model of a session, and its requests by number.

    Attributes:
        digest: of what was asked for.
        model_id: the server's name; None where no answer was recorded.
        request_id: of the request that made it.
        made_with: how many numbered requests belong to its creation.
        start: the checkpoint that it was restored from, and the step that came first then.
        refused: the numbers and digests of requests that the server has refused.
    """

    digest: str | None = None
    model_id: str | None = None
    request_id: str | None = None
    made_with: int = 0
    start: tuple[str, int] | None = None
    sent: dict[int, Sent] = Factory(dict)
    refused: set[tuple[int, str]] = Factory(set)

    @property
    def last_request(self) -> str | None:
        """Return the last request that the server has accepted."""
        accepted = [one for one in self.sent.values() if one.request_id]
        return max(accepted, key=lambda one: one.number).request_id if accepted else self.request_id

    @property
    def last_step(self) -> int | None:
        """Return the step that was under way."""
        return max((one.step for one in self.sent.values() if one.step is not None), default=None)

    @property
    def checkpoint(self) -> tuple[str, int] | None:
        """Return the last checkpoint of a step, and the step to go on with after it.

        >>> sent = {1: Sent(1, "optim_step", "", 7, "r1"), 2: Sent(2, "save_weights", "", 7, "r2", path="p")}
        >>> ModelHistory(sent=sent).checkpoint
        ('p', 8)
        """
        for one in sorted(self.sent.values(), key=lambda one: -one.number):
            if one.call == "save_weights" and one.path is not None and one.step is not None:
                # A checkpoint before the step of its turn holds nothing of that turn.
                stepped = any(
                    other.call == "optim_step" and other.step == one.step and other.number < one.number
                    for other in self.sent.values()
                )
                return one.path, one.step + stepped
        return self.start

    @property
    def unread(self) -> list[Sent]:
        """Return the accepted requests whose results have not arrived, in order."""
        unread = [one for one in self.sent.values() if one.request_id is not None and not one.arrived]
        return sorted(unread, key=lambda one: one.number)


@define
class SessionHistory:
    """One session, and its models by number."""

    session_id: str
    url: str
    status: str | None = None
    """How it ended; None while it goes on."""
    models: dict[int, ModelHistory] = Factory(dict)


def read(lines: Iterable[dict[str, Any]]) -> SessionHistory | None:
    """Return the history of the last session; None where there is none."""
    session: SessionHistory | None = None
    for line in lines:
        if "session" in line:
            session = SessionHistory(line["session"], line["url"])
        elif session is None:
            continue
        elif "over" in line:
            session.status = line["over"]
        else:
            _add(session.models.setdefault(line["of"], ModelHistory()), line)
    return session


def _add(model: ModelHistory, line: dict[str, Any]) -> None:
    if "model" in line:
        model.model_id, model.request_id, model.digest = line["model"], line["id"], line["digest"]
        model.made_with = len(model.sent)
        model.start = tuple(line["start"]) if line.get("start") else None
    elif "send" in line:
        number = line["send"]
        model.sent[number] = Sent(number, line["call"], line["digest"], line.get("step"))
    elif "sent" in line:
        model.sent[line["sent"]].request_id = line["id"]
    elif "refused" in line:
        del model.sent[line["refused"]]
        model.refused.add((line["refused"], line["digest"]))
    elif "settled" in line:
        # A harmless request has used up the number, or the server had this one.
        model.sent[line["settled"]] = Sent(line["settled"], "", "", None, "", arrived=True)
    elif "arrived" in line:
        one = model.sent[line["arrived"]]
        one.arrived, one.path = True, line.get("path")
