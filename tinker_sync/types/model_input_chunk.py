"""`EncodedTextChunk`, `ImageChunk`, `ModelInputChunk`, for scripts that look for it here."""

from __future__ import annotations

from tinker_sync.types.model_input import EncodedTextChunk as EncodedTextChunk
from tinker_sync.types.model_input import ImageChunk as ImageChunk
from tinker_sync.types.model_input import ModelInputChunk as ModelInputChunk
