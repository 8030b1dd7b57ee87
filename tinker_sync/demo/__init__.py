"""The main job in one command: a model is taught by examples, then by reward, in under a minute.

    lessons     what is taught; problems, prompts and rewards from seeds
    student     one step of either kind, through the clients
    doomed      a process that trains until it is killed; crash kills it
    course      both lessons from beginning to end
    result      what came of it, and whether that is good enough
    screen      what is printed meanwhile; plot, png: the curves
    recipe      the code to take home

Every name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_sync._lazy import lazy_names

if TYPE_CHECKING:
    from tinker_sync.demo.command import main
    from tinker_sync.demo.course import run
    from tinker_sync.demo.recipe import RECIPE
    from tinker_sync.demo.result import DemoResult, Steps

_HOMES: dict[str, tuple[str, ...]] = {
    "tinker_sync.demo.command": ("main",),
    "tinker_sync.demo.course": ("run",),
    "tinker_sync.demo.recipe": ("RECIPE",),
    "tinker_sync.demo.result": ("DemoResult", "Steps"),
}

__all__ = ["RECIPE", "DemoResult", "Steps", "main", "run"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
