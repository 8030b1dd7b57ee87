"""Module paths that scripts written for the reference client import from; nothing lives here.

Each module names what such scripts look for in it and loads that when it is asked for.
"""

from __future__ import annotations
