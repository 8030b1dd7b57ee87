"""The reference as one page: `python -m tinker_sync.docs [FILE]` writes it from the docstrings.

    names     the public names with their signatures, descriptions and examples
    tables    losses, errors, environment variables, servers, and what scripts of the reference client change
    scale     one process and many: figures, limits, and what servers support
    markup    the house's docstrings as HTML
    page      the page: one file, searchable, in light and dark, for narrow and wide windows

The tables that the code knows are made from it; tests compare the others with the code. One thread.
"""

from __future__ import annotations

from tinker_sync.docs.page import make_page

__all__ = ["make_page"]
