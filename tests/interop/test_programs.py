"""A program of a client that does not end is named, with the stacks of its threads."""

from __future__ import annotations

import pytest
from interop.programs import HungError, Programs


def test_a_program_that_hangs_is_ended_and_tells_where(programs: Programs) -> None:
    text = "import time\ndef stuck():\n    time.sleep(1000)\nstuck()"
    with pytest.raises(HungError, match=r"(?s)a program x hangs with tinker_sync.* in stuck\n"):
        programs.results("tinker_sync", text, "x", patience_s=1)
    assert programs.results("tinker_sync", "print(7)") == 7
