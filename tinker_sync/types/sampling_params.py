"""`SamplingParams`, under a second import path for scripts of the reference client."""

from __future__ import annotations

from tinker_sync.types.sampling import SamplingParams as SamplingParams
