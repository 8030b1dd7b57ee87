"""The context of the user's trace as W3C headers, if the user's code runs in a span of OpenTelemetry.

OpenTelemetry is never imported here, because a program that has not imported it has no span. Baggage is not
sent, because users put data of their own into it.
"""

from __future__ import annotations

import os
import sys

_NONE: dict[str, str] = {}


def trace_headers() -> dict[str, str]:
    """Return `traceparent`, and `tracestate` if there is one, of the current span; empty without a span.

    `OTEL_PROPAGATORS` without `tracecontext`, such as `none`, turns this off.

    >>> trace_headers()
    {}
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return _NONE
    try:
        context = trace.get_current_span().get_span_context()
        if not context.is_valid or "tracecontext" not in os.environ.get("OTEL_PROPAGATORS", "tracecontext"):
            return _NONE
        ids = f"{context.trace_id:032x}-{context.span_id:016x}"
        headers = {"traceparent": f"00-{ids}-{context.trace_flags & 0xFF:02x}"}
        if context.trace_state:
            headers["tracestate"] = context.trace_state.to_header()
    except Exception:  # noqa: BLE001  # it may be half imported, or another package of that name
        return _NONE
    return headers
