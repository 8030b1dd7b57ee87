"""Displays of values for notebooks, loaded when the first value is displayed.

    tokens     a sample as text, each token shaded by its log-probability
    tables     metrics, runs, checkpoints, models and usage as tables, and as rows for pandas
    progress   a future with its state, a client with its curve
    page       escaped HTML in the look that all displays share

A display never waits, sends nothing and shows no credential. It inherits the colours of the notebook, so that
light and dark themes both work. Any thread may call this package.

>>> import tinker_sync
>>> "2 tokens" in html_of(tinker_sync.SampledSequence("stop", None, [20, 21], [-0.1, -2.0]))
True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tinker_sync.display.tables import frame_of
from tinker_sync.display.tokens import shade

__all__ = ["frame_of", "html_of", "shade"]

# The module and function that display a class, by the class's name: the class itself would need an import.
_DISPLAYS: Final[dict[str, tuple[str, str]]] = {
    "SampledSequence": ("tokens", "sequence_html"),
    "SampleResponse": ("tokens", "response_html"),
    "ForwardBackwardOutput": ("tables", "pass_html"),
    "OptimStepResponse": ("tables", "step_html"),
    "TrainingRunsResponse": ("tables", "list_html"),
    "CheckpointsListResponse": ("tables", "list_html"),
    "GetServerCapabilitiesResponse": ("tables", "list_html"),
    "TrainingRun": ("tables", "entry_html"),
    "Checkpoint": ("tables", "entry_html"),
    "Usage": ("tables", "usage_html"),
    "TrainingClient": ("progress", "training_html"),
    "ClientFuture": ("progress", "client_html"),
    "APIFuture": ("progress", "future_html"),
}


def html_of(value: object) -> str | None:
    """Return the display of a value as HTML, or None if its class has none.

    >>> html_of(3) is None
    True
    """
    import importlib

    for kind in type(value).__mro__:
        place = _DISPLAYS.get(kind.__name__) if kind.__module__.startswith("tinker_sync.") else None
        if place is not None:
            make: Callable[[Any], str] = getattr(
                importlib.import_module(f"tinker_sync.display.{place[0]}"), place[1]
            )
            return make(value)
    return None
