"""What users see: validation, documentation, and one line of work for each method."""

from __future__ import annotations
