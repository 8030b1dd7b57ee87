"""The reference page: every public name, tables that agree with the code, and a page without other files."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import pytest

import tinker_sync
from tinker_sync import errors
from tinker_sync.docs import make_page, tables
from tinker_sync.docs.__main__ import main
from tinker_sync.docs.markup import inline, to_html
from tinker_sync.docs.names import modules
from tinker_sync.local.engine.losses import LOSSES
from tinker_sync.types.scalars import LossFnType

PACKAGE = Path(tinker_sync.__file__).parent
VOID = {"meta", "input", "br"}


@pytest.fixture(scope="module")
def page() -> str:
    return make_page()


class Checker(HTMLParser):
    """An HTML parser that records unbalanced tags, ids, and links within the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        found = dict(attrs)
        self.ids += [str(found["id"])] if "id" in found else []
        if str(found.get("href")).startswith("#"):
            self.links.add(str(found["href"])[1:])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"{tag} at {self.getpos()}"


def test_the_page_is_whole_and_its_links_lead_somewhere(page: str) -> None:
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert checker.links <= set(checker.ids)


def test_the_page_loads_nothing(page: str) -> None:
    assert not re.search(r"<(?:script|img|link|iframe)[^>]*(?:src|href)=", page)
    assert "@import" not in page
    assert "url(" not in page.partition("</style>")[0]


def test_every_public_name_is_there(page: str) -> None:
    anchors = set(re.findall(r'id="([^"]+)"', page))
    shown = {anchor.rpartition(".")[2] for anchor in anchors}
    values = {name for name in tinker_sync.__all__ if not name.startswith("_")} - {
        "auth", "data", "errors", "losses", "types",
    }  # fmt: skip
    # An alias of another name has no entry of its own.
    same = {name for name in values if getattr(tinker_sync, name).__class__ is type and name not in shown}
    same = {name for name in same if getattr(tinker_sync, name).__name__ in shown}
    assert values - shown - same == set()
    assert "tinker_sync.SamplingClient.sample" in anchors
    assert "tinker_sync.SamplingClient.sample_async" not in anchors
    assert "also as <code>sample_async</code>" in page
    assert not any(anchor.endswith((".mark_sending", ".when_done")) for anchor in anchors)


def test_examples_are_shown(page: str) -> None:
    clients = [entry for _, _, _, entries in modules() for entry in entries if entry.name == "ServiceClient"]
    assert all(">>>" in member.doc for member in clients[0].members)
    assert "<i>&gt;&gt;&gt; </i>" in page
    assert "# doctest" not in page


def test_the_losses_are_those_of_the_protocol() -> None:
    _, rows = tables.losses()
    assert {row[0].strip("`") for row in rows} == set(get_args(LossFnType))
    assert set(tables.FORMULAS) == set(LOSSES)
    assert (
        "`dro`",
        tables.FORMULAS["dro"],
        "`target_tokens`, `logprobs`, `advantages`",
        "`beta` 0.05",
    ) in rows


def test_every_error_is_listed() -> None:
    _, rows = tables.error_rows()
    found = {row[0].strip("`") for row in rows}
    assert {"TinkerError", "RateLimitError", "MissingExtraError"} <= found <= set(errors.__all__)
    assert all(row[1] for row in rows)


def test_every_environment_variable_is_listed() -> None:
    used: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        if "docs" not in path.parts:
            text = path.read_text(encoding="utf-8")
            used |= set(re.findall(r"[\"']((?:TINKER|CLOUDFLARE)_[A-Z_]+[A-Z])[\"']", text))
    assert used - set(tables.VARIABLES) == set()
    known = {name for name in tables.VARIABLES if name.startswith("TINKER_")}
    assert known - used == set()


def test_servers_are_told_apart() -> None:
    heads, rows = tables.servers()
    by_name = {row[0]: row[1:] for row in rows}
    assert heads[1] == "hosted, 0.38"
    assert by_name["inflight sampling clients"] == ("yes", "no", "no", "no", "no")
    assert by_name["`forward`"][-1] == "yes"


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("Give `a` & ``b``.", "<p>Give <code>a</code> &amp; <code>b</code>.</p>"),
        (
            "Raises:\n    KeyError: it is\n        gone.",
            "<h5>Raises</h5><dl><dt>KeyError</dt><dd>it is gone.</dd></dl>",
        ),
        ("- one\n- two", "<ul><li>one</li><li>two</li></ul>"),
        ("    a  b", "<pre>a  b</pre>"),
        (">>> 1 < 2\nTrue", "<pre><i>&gt;&gt;&gt; </i>1 &lt; 2\n<samp>True</samp></pre>"),
    ],
)
def test_docstrings_become_html(text: str, html: str) -> None:
    assert to_html(text) == html


def test_markup_is_escaped() -> None:
    assert inline("<script>") == "&lt;script&gt;"


def test_the_command_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = main([str(tmp_path / "a.html")])
    assert place.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "wrote" in capsys.readouterr().out
