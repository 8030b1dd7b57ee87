"""Reports to the service about sessions and failures of its client, unless telemetry is off.

`reports` turns a failure into an event without content, `buffer` keeps events, `sender` sends them. Only the
thread `tinker-telemetry` sends. Nothing here knows a client; `clients.service` wires it in.
"""

from __future__ import annotations
