"""What the entry point names: it only refers to the fixtures, by the name others refer to them by."""

from __future__ import annotations

pytest_plugins = ("tinker_sync.testing.pytest_plugin",)
