"""The embedded server. It knows the wire and the types, and no client.

engine   the model that learns;  tiny     the one that is built in
host     what computes;          store    what is kept
server   what answers requests;  launch   a process for it
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_sync._lazy import lazy_names

if TYPE_CHECKING:
    from tinker_sync.local.launch.serving import serve

__all__ = ["serve"]

if not TYPE_CHECKING:
    # The engine is of use without the server, and quicker to load.
    __getattr__, __dir__ = lazy_names(__name__, {"tinker_sync.local.launch.serving": ("serve",)})
