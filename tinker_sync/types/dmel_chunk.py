"""`DmelChunk`, for scripts that look for it here."""

from __future__ import annotations

from tinker_sync.types.model_input import DmelChunk as DmelChunk
