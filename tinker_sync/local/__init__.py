"""The embedded server. It knows the wire and the types, and no client.

engine   the model that learns;  tiny     the one that is built in
host     what computes;          store    what is kept
server   what answers requests;  launch   a process for it
"""

from __future__ import annotations

from tinker_sync.local.launch.serving import serve

__all__ = ["serve"]
