"""The commands, a module for each noun."""

from __future__ import annotations
