"""The embedded server. It knows the wire and the types, and no client.

engine   training and sampling in numpy;  tiny     the built-in base model
host     the computing threads;           store    the durable state
server   the HTTP service;                process  how it starts and ends
"""

from __future__ import annotations

from tinker_sync._lazy import lazy_names

# Importing the engine alone must not load the server.
__getattr__, __dir__, __all__ = lazy_names(__name__, {"tinker_sync.local.process.serving": "serve"})
