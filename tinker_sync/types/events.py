"""Telemetry events, which the reference client sends to the service and this package does not."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, TypeAlias

import attrs

from tinker_sync.types._model import Model, model
from tinker_sync.types.scalars import EventType, Severity


@model
class SessionStartEvent(Model):
    """The start of a session at the server. `event_session_index` counts the events of a process from 0."""

    __response__ = True
    __tag__ = ("event", "SESSION_START")

    event: EventType
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime


@model
class SessionEndEvent(Model):
    """The end of a session after `duration`, a text such as "0:00:12.5"."""

    __response__ = True
    __tag__ = ("event", "SESSION_END")

    duration: str
    event: EventType
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime


@model
class UnhandledExceptionEvent(Model):
    """An error that a call raised to the user, and that was not the user's fault."""

    __response__ = True
    __tag__ = ("event", "UNHANDLED_EXCEPTION")

    error_message: str
    error_type: str
    event: EventType
    event_id: str
    event_session_index: int
    severity: Severity
    timestamp: datetime
    traceback: str | None = None


@model
class GenericEvent(Model):
    """An event that has no class of its own. `event_name` states its kind.

    >>> GenericEvent(
    ...     event="GENERIC_EVENT",
    ...     event_id="1",
    ...     event_name="user_error",
    ...     event_session_index=0,
    ...     severity="WARNING",
    ...     timestamp="2026-01-31T12:00:00Z",
    ...     event_data={"error_type": "ValueError"},
    ... ).event_data["error_type"]
    'ValueError'
    """

    __response__ = True
    __tag__ = ("event", "GENERIC_EVENT")

    event: EventType
    event_id: str
    event_name: str
    event_session_index: int
    severity: Severity
    timestamp: datetime
    event_data: dict[str, object] = attrs.field(factory=dict)


TelemetryEvent: TypeAlias = SessionStartEvent | SessionEndEvent | UnhandledExceptionEvent | GenericEvent
"""A telemetry event."""


@model
class TelemetryBatch(Model):
    """The events of one process, with its platform."""

    __response__ = True

    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str


@model
class TelemetrySendRequest(Model):
    """A request that sends the events of one process to the service.

    >>> TelemetrySendRequest(
    ...     events=[], platform="Linux", sdk_version="0.36.0", session_id="s-1", process_uuid="p-1"
    ... ).platform
    'Linux'
    """

    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str


@model
class TelemetryResponse(Model):
    """The service's answer that it has accepted the events of a request."""

    __response__ = True

    status: Literal["accepted"]
