"""Conversion of this package's docstrings to HTML: paragraphs, sections, lists, code and examples. Pure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

_SECTION: Final = re.compile(r"^(Args|Raises|Returns|Attributes|Yields|Example):{1,2}$")
_ENTRY: Final = re.compile(r"^\s{4}(\w[\w .,`*]*): (.*)$")
_CODE: Final = re.compile(r"``(.+?)``|`(.+?)`")


def to_html(docstring: str) -> str:
    """Return a docstring as HTML. `inspect.getdoc` must have dedented it.

    >>> to_html("Add `a` to b.\\n\\nArgs:\\n    a: a <number>.\\n\\n>>> add(1)\\n2")[:39]
    '<p>Add <code>a</code> to b.</p><h5>Args'
    """
    blocks = re.split(r"\n\s*\n", docstring.strip("\n"))
    return "".join(_block(block) for block in blocks if block.strip())


def inline(text: str) -> str:
    """Return a line of a docstring as HTML.

    >>> inline("see `x` & y")
    'see <code>x</code> &amp; y'
    """
    return _CODE.sub(lambda found: f"<code>{found[1] or found[2]}</code>", escape(text, quote=False))


def summary(docstring: str) -> str:
    """Return the first paragraph of a docstring up to its first full stop or colon.

    >>> summary("Add a to b. Both are numbers.")
    'Add a to b.'
    """
    first = " ".join(docstring.strip().split("\n\n")[0].split())
    end = re.search(r"[.:](?=\s|$)", first)
    return first if end is None else f"{first[: end.start()]}."


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as HTML. Cells with "yes" or "no" have this word as their class."""
    head = "".join(f"<th>{inline(cell)}</th>" for cell in heads)
    body = "".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(text: str) -> str:
    mark = f' class="{text}"' if text in ("yes", "no") else ""
    return f"<td{mark}>{inline(text)}</td>"


def _block(block: str) -> str:
    lines = block.split("\n")
    if lines[0].lstrip().startswith(">>>"):
        return f"<pre>{_example(lines)}</pre>"
    section = _SECTION.match(lines[0].strip())
    if section and len(lines) > 1:
        return f"<h5>{section[1]}</h5>{_entries(lines[1:])}"
    if all(line.startswith("    ") for line in lines):
        return f"<pre>{escape(inspect.cleandoc(block), quote=False)}</pre>"
    before = [line for line in lines if not line.startswith("    ")]
    if lines[0].startswith("- "):
        items = re.split(r"\n- ", block[2:])
        return f"<ul>{''.join(f'<li>{inline(item)}</li>' for item in items)}</ul>"
    if len(before) < len(lines):
        rest = "\n".join(line for line in lines if line.startswith("    "))
        return f"<p>{inline(' '.join(before))}</p><pre>{escape(inspect.cleandoc(rest), quote=False)}</pre>"
    return f"<p>{inline(' '.join(lines))}</p>"


def _entries(lines: list[str]) -> str:
    entries: list[list[str]] = []
    for line in lines:
        found = _ENTRY.match(line)
        if found:
            entries.append([found[1], found[2]])
        elif entries:
            entries[-1][1] += f" {line.strip()}"
        else:
            entries.append(["", line.strip()])
    rows = "".join(f"<dt>{inline(name)}</dt><dd>{inline(text)}</dd>" for name, text in entries)
    return f"<dl>{rows}</dl>"


def _example(lines: list[str]) -> str:
    """Return an example as HTML, with each `>>>` or `...` in its own element, so that copying can omit it."""
    shown = []
    for line in lines:
        text = line.removesuffix("  # doctest: +ELLIPSIS").removesuffix("  # doctest: +NORMALIZE_WHITESPACE")
        prompt = re.match(r"(>>>|\.\.\.)( |$)", text)
        if prompt:
            shown.append(f"<i>{prompt[0]}</i>{escape(text[prompt.end() :], quote=False)}")
        else:
            shown.append(f"<samp>{escape(text, quote=False)}</samp>")
    return (
        "\n".join(shown)
        .replace("<i>>>> </i>", "<i>&gt;&gt;&gt; </i>")
        .replace("<i>>>></i>", "<i>&gt;&gt;&gt;</i>")
    )
