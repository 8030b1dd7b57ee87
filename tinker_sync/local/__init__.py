"""The embedded server. It knows the wire and the types, and no client."""

from __future__ import annotations
