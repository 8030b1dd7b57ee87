"""Reports to the service about sessions and failures of a client, unless telemetry is off.

`reports` turns a failure into an event without the user's data and queues events; `sender` sends them on the
thread `tinker-telemetry`. This package imports no client; `clients.service` makes a client use it.
"""

from __future__ import annotations
