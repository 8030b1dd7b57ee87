"""The HTML page of the reference: one searchable file that loads no other file, in light and dark."""

from __future__ import annotations

from html import escape
from typing import Final

from tinker_sync._version import __version__
from tinker_sync.docs import scale, tables
from tinker_sync.docs.markup import inline, summary, table, to_html
from tinker_sync.docs.names import NameEntry, modules

_STYLE: Final = """
:root { color-scheme: light dark; --back:#fff; --text:#1c2430; --faint:#5b6675; --line:#dde3ea; --soft:#f4f6f9;
  --link:#0b5fc4; --mark:#fff3c4; }
@media (prefers-color-scheme: dark) { :root { --back:#12161c; --text:#dfe5ec; --faint:#94a0ae; --line:#2a323d;
  --soft:#1a2029; --link:#7ab7ff; --mark:#4b4113; } }
* { box-sizing: border-box; }
html { scroll-padding-top: 1rem; }
body { margin:0; background:var(--back); color:var(--text); font:16px/1.55 system-ui, sans-serif;
  display:grid; grid-template-columns: 19rem minmax(0, 1fr); }
a { color:var(--link); text-decoration:none; } a:hover { text-decoration:underline; }
nav { position:sticky; top:0; height:100vh; overflow-y:auto; padding:1rem; border-right:1px solid var(--line);
  background:var(--soft); font-size:.9rem; }
nav input { width:100%; padding:.5rem .6rem; font:inherit; color:inherit; background:var(--back);
  border:1px solid var(--line); border-radius:6px; }
nav ul { list-style:none; margin:.3rem 0 .8rem; padding:0; } nav li { overflow-wrap:anywhere; padding:.05rem 0; }
nav summary { cursor:pointer; font-weight:600; padding:.15rem 0; }
nav .count { color:var(--faint); margin:.4rem 0; }
main { padding:1.5rem clamp(1rem, 4vw, 3rem) 6rem; max-width:62rem; }
h1 { margin:0 0 .3rem; line-height:1.2; } h2 { margin:3rem 0 .5rem; padding-bottom:.3rem;
  border-bottom:1px solid var(--line); } h3 { margin:2.2rem 0 .3rem; } h4 { margin:1.5rem 0 .2rem; }
h5 { margin:.7rem 0 .2rem; color:var(--faint); font-size:.8rem; text-transform:uppercase; letter-spacing:.05em; }
h3, h4 { font-family:ui-monospace, monospace; font-size:1.02rem; font-weight:700; overflow-wrap:anywhere; }
h3 { font-size:1.15rem; } h3 small, h4 small { color:var(--faint); font-weight:400; font-size:.85em; }
section.member { margin-left:clamp(0rem, 2vw, 1.5rem); }
code { font-family:ui-monospace, monospace; font-size:.9em; background:var(--soft); padding:.05em .25em;
  border-radius:4px; overflow-wrap:anywhere; }
pre { background:var(--soft); border:1px solid var(--line); border-radius:6px; padding:.7rem .9rem;
  overflow-x:auto; font:.85rem/1.5 ui-monospace, monospace; margin:.6rem 0; }
pre i { font-style:normal; color:var(--faint); user-select:none; } pre samp { color:var(--faint); font:inherit; }
.signature { color:var(--faint); font:.85rem/1.5 ui-monospace, monospace; overflow-wrap:anywhere; margin:0; }
p { margin:.5rem 0; } dl { margin:.3rem 0; display:grid; grid-template-columns: minmax(6rem, max-content) 1fr;
  gap:.15rem 1rem; } dt { font-family:ui-monospace, monospace; font-size:.85rem; overflow-wrap:anywhere; }
dd { margin:0; } .scroll { overflow-x:auto; } table { border-collapse:collapse; width:100%; font-size:.9rem; }
th, td { text-align:left; vertical-align:top; padding:.4rem .7rem; border-bottom:1px solid var(--line); }
th { color:var(--faint); white-space:nowrap; } td code { overflow-wrap:normal; }
td:first-child code, dt code { white-space:nowrap; } nav li.inner { padding-left:.9rem; } td.yes { color:#1a9a4b; } td.no { color:var(--faint); }
.hidden { display:none; } footer { color:var(--faint); margin-top:4rem; }
@media (max-width: 52rem) { body { display:block; } nav { position:static; height:auto; border-right:0;
  border-bottom:1px solid var(--line); } nav details { display:none; } nav.searching details { display:block; }
  dl { grid-template-columns:1fr; gap:0; } dd { margin:0 0 .4rem 1rem; } main { padding-top:1rem; } }
"""  # noqa: E501  # style sheets have lines of their own

_SCRIPT: Final = """
const box = document.querySelector('nav input'), nav = document.querySelector('nav');
const entries = [...document.querySelectorAll('nav li')].map(li => [li, li.dataset.find]);
const groups = [...document.querySelectorAll('nav details')], count = document.querySelector('nav .count');
const open = groups.map(group => group.open);
function search() {
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  nav.classList.toggle('searching', words.length > 0);
  let found = 0;
  for (const [li, text] of entries) {
    const hit = words.every(word => text.includes(word));
    li.classList.toggle('hidden', !hit); found += hit;
  }
  groups.forEach((group, at) => {
    const any = group.querySelector('li:not(.hidden)') !== null;
    group.classList.toggle('hidden', !any); group.open = words.length ? any : open[at];
  });
  count.textContent = words.length ? `${found} found` : '';
}
box.addEventListener('input', search);
box.addEventListener('keydown', event => {
  const first = document.querySelector('nav li:not(.hidden) a');
  if (event.key === 'Enter' && first) first.click();
  if (event.key === 'Escape') { box.value = ''; search(); }
});
document.addEventListener('keydown', event => {
  if (event.key === '/' && document.activeElement !== box) { event.preventDefault(); box.focus(); }
});
"""

_TABLES: Final = (
    (
        "losses",
        "Losses",
        tables.losses,
        (
            "A pass sums the loss over all tokens of all data; `loss:sum` is that sum, and `loss:mean` its "
            "share of each token that counts. Of each token, `p` is the log-probability that the model gives "
            "the target, `q` that of the sampler, `r = exp(p - q)`, `A` the advantage and `w` the weight."
        ),
    ),
    (
        "errors",
        "Errors and what to do",
        tables.error_rows,
        "Everything raised on purpose is a `TinkerError`.",
    ),
    ("environment", "Environment variables", tables.variables, "Arguments come before variables."),
    (
        "servers",
        "Servers",
        tables.servers,
        (
            "The first call finds out what a server speaks. What an older one would drop silently is refused "
            "with `UnsupportedByServerError` before it is sent. The embedded server offers all of the newest."
        ),
    ),
    (
        "migration",
        "From tinker to tinker_sync",
        tables.migration,
        "Scripts of 0.36 and 0.38 run with one import changed.",
    ),
)


_INNER: Final = ' class="inner"'


def make_page() -> str:
    """Return the whole page as HTML.

    >>> page = make_page()
    >>> "tinker_sync.ServiceClient.explain" in page, "<script src" in page
    (True, False)
    """
    found = list(modules())
    guides = [*((anchor, title) for anchor, title, *_ in _TABLES), (scale.ANCHOR, scale.TITLE)]
    navigation = [_group("Tables", [(f"#{anchor}", title, title) for anchor, title in guides], opened=True)]
    body = [
        f'<h2 id="{anchor}">{escape(title)}</h2><p>{inline(words)}</p>{table(*make())}'
        for anchor, title, make, words in _TABLES
    ]
    body.append(scale.section())
    for path, title, doc, entries in found:
        if not entries:
            continue
        links = [
            (f"#{one.anchor}", one.name, f"{one.anchor} {summary(one.doc) if one.doc else ''}")
            for entry in entries
            for one in (entry, *entry.members)
        ]
        navigation.append(_group(title, links, opened=path == "tinker_sync"))
        body.append(f'<h2 id="{path}">{escape(title)} <small><code>{path}</code></small></h2>')
        if path not in ("tinker_sync", "tinker_sync.types"):
            body.append(to_html(doc))
        body += [_entry(entry) for entry in entries]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>tinker_sync {__version__}</title><style>{_STYLE}</style></head><body>"
        '<nav><input type="search" placeholder="Search ( / )" aria-label="Search">'
        f'<div class="count"></div>{"".join(navigation)}</nav>'
        f"<main><h1>tinker_sync {__version__}</h1>"
        "<p>A blocking client for the Tinker training and sampling API. "
        "Every example of this page runs in the test suite, most of them on the embedded server "
        f'(<code>base_url="local"</code>).</p>{"".join(body)}'
        "<footer>Written by <code>python -m tinker_sync.docs</code> from the docstrings.</footer></main>"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _group(title: str, links: list[tuple[str, str, str]], *, opened: bool) -> str:
    items = "".join(
        f'<li data-find="{escape(text.lower())}"{_INNER if "." in name else ""}>'
        f'<a href="{escape(place)}">{escape(name.rpartition(".")[2])}</a></li>'
        for place, name, text in links
    )
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary><ul>{items}</ul></details>"


def _entry(entry: NameEntry, level: int = 3) -> str:
    name = entry.name.rpartition(".")[2] if level > 3 else entry.name
    kind = f" <small>{entry.kind}</small>" if entry.kind in ("class", "property") else ""
    note = f"<p>{inline(entry.note)}</p>" if entry.note else ""
    signature = f'<p class="signature">{escape(name + entry.signature)}</p>' if entry.signature else ""
    members = "".join(f'<section class="member">{_entry(one, 4)}</section>' for one in entry.members)
    return (
        f'<h{level} id="{escape(entry.anchor)}"><a href="#{escape(entry.anchor)}">{escape(name)}</a>{kind}'
        f"</h{level}>{signature}{to_html(entry.doc) if entry.doc else ''}{note}{members}"
    )
