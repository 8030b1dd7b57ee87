"""The text with which a call is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tinker_sync.errors import InvalidInputError


def refusal(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """Call a function that must raise InvalidInputError, and return the text of the error."""
    with pytest.raises(InvalidInputError) as caught:
        call(*arguments, **named)
    return str(caught.value)
