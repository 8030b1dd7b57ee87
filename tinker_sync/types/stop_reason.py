"""`StopReason`, for scripts that look for it here."""

from __future__ import annotations

from tinker_sync.types.scalars import StopReason as StopReason
