"""The embedded server. It uses `tinker_sync.wire` and `tinker_sync.types`, and imports no client.

engine   training and sampling in numpy;  tiny     the built-in base model
server   the HTTP service;                store    the durable state
launch   a server in a child process;     running  a server in this process
"""

from __future__ import annotations

from tinker_sync._base.lazy import lazy_names

# Loaded on first use, because an import of the engine alone must not load the server.
__getattr__, __dir__, __all__ = lazy_names(__name__, {"tinker_sync.local.running": "serve"})
