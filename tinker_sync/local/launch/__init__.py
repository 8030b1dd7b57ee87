"""Running an embedded server in a process of its own.

serving   `serve`: one that stays, in this process
command   `python -m tinker_sync.local`
child     one that belongs to the process that started it; `tinker_sync.launch` is the other side of that
assembly  the parts of a server, put together
"""

from __future__ import annotations
