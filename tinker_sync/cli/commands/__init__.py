"""The commands: one module for each noun."""

from __future__ import annotations
