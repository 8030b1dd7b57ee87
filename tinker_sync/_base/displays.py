"""Methods that display values in notebooks or turn them into tables of pandas.

They load the display code on first use.

A class sets `_repr_html_ = repr_html`; a list of entries also sets `to_pandas = to_pandas`.
"""

from __future__ import annotations

from typing import Any


def repr_html(self: object) -> str | None:
    """Return the display of a value for a notebook, or None if the plain repr is better."""
    from tinker_sync.insight.displays import html_of

    return html_of(self)


def to_pandas(self: object) -> Any:
    """Return the entries as a `pandas.DataFrame`, one row for each. Needs pandas."""
    from tinker_sync.insight.displays import frame_of

    return frame_of(self)
