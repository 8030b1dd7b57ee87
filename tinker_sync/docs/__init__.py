"""The reference as one page: `python -m tinker_sync.docs [FILE]` writes it from the docstrings.

    names     the public names with their signatures, descriptions and examples
    tables    losses, errors, environment variables, servers, and changes for scripts of the reference client
    scale     one process and many: figures, limits, and the features that servers support
    markup    converts this package's docstrings to HTML
    page      the page: one file, searchable, in light and dark, for narrow and wide windows

Most tables are made from the data in the code; tests compare the others with the code. For one thread.
"""

from __future__ import annotations

from tinker_sync.docs.page import make_page

__all__ = ["make_page"]
