"""A parser of the `WWW-Authenticate` header of a 401, which shows if a token was rejected. Pure."""

from __future__ import annotations

import re
from typing import Final

# A parameter of a challenge, or a quoted text outside of any parameter. The last quote may be missing.
_TOKEN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]"  # noqa: S105 - a class of characters
_QUOTED: Final = r'"(?:[^"\\]|\\.)*(?:"|$)'
# `re` compiles it at the first 401; most programs see none.
_PART: Final = rf"(?<!{_TOKEN})({_TOKEN}+)[ \t]*=[ \t]*({_QUOTED}|{_TOKEN}+)|{_QUOTED}"


def rejects_token(header: str | None) -> bool:
    """Return True if the server rejects the credential as an invalid token, so that a new one may help.

    Args:
        header: the value of `WWW-Authenticate`; commas separate several challenges.

    >>> rejects_token('Basic realm="x", Bearer Error = INVALID_TOKEN')
    True
    >>> rejects_token('Bearer error_description="not error=invalid_token", error="insufficient_scope"')
    False
    """
    return any(
        (found[1] or "").lower() == "error" and _unquoted(found[2]).lower() == "invalid_token"
        for found in re.finditer(_PART, header or "", re.DOTALL)
    )


def _unquoted(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value[1:].removesuffix('"')) if value.startswith('"') else value
