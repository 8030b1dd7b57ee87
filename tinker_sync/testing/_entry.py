"""The pytest entry point. It only names the module of the fixtures, which pytest then registers once."""

from __future__ import annotations

pytest_plugins = ("tinker_sync.testing.pytest_plugin",)
