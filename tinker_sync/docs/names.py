"""The public names of the modules, with signatures, descriptions, and the members of classes."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

from attrs import frozen

MODULES: Final = {
    "tinker_sync": "Clients and values",
    "tinker_sync.types": "All values of the API",
    "tinker_sync.errors": "Errors",
    "tinker_sync.data": "Training examples from text, chats and samples",
    "tinker_sync.losses": "Losses of your own, and ready ones",
    "tinker_sync.text": "Tokenizers",
    "tinker_sync.batch": "Many calls at once",
    "tinker_sync.usage": "What was used, and what it costs",
    "tinker_sync.insight.recording": "Where the time goes",
    "tinker_sync.display": "Displays for notebooks",
    "tinker_sync.testing": "Tests of your own code",
    "tinker_sync.local": "A server on this machine",
    "tinker_sync.auth": "Keys",
    "tinker_sync.diagnose": "What is wrong between here and the server",
    "tinker_sync.demo": "The demo",
}
# The public names of a module without `__all__`.
_LISTED: Final = {"tinker_sync.insight.recording": ("Recording",)}
_CLIENTS_FIRST: Final = (
    "ServiceClient", "TrainingClient", "SamplingClient", "RestClient", "AdminClient", "APIFuture",
)  # fmt: skip


@frozen
class NameEntry:
    """A public name, with its description and members."""

    module: str
    name: str
    kind: str
    """"class", "function", "value", "property" or "method"."""
    signature: str
    doc: str
    members: tuple[NameEntry, ...] = ()
    note: str = ""

    @property
    def anchor(self) -> str:
        """The id of the HTML element of this name on the page."""
        return f"{self.module}.{self.name}"


def modules() -> Iterator[tuple[str, str, str, list[NameEntry]]]:
    """Yield each module's path, title, description and names. A value that two modules export comes once."""
    seen: set[int] = set()
    for path, title in MODULES.items():
        module = importlib.import_module(path)
        entries = []
        for name in names_of(module):
            value = getattr(module, name)
            if inspect.ismodule(value) or id(value) in seen:
                continue
            seen.add(id(value))
            entries.append(entry_of(path, name, value))
        yield path, title, inspect.getdoc(module) or "", entries


def names_of(module: ModuleType) -> list[str]:
    """Return the public names of a module, clients first."""
    names = _LISTED.get(module.__name__) or getattr(module, "__all__", None)
    if names is None:
        names = [name for name, value in vars(module).items() if _is_own(module, name, value)]
    public = [name for name in names if not name.startswith("_")]
    first = [name for name in _CLIENTS_FIRST if name in public]
    return first + sorted((name for name in public if name not in first), key=str.lower)


def _is_own(module: ModuleType, name: str, value: Any) -> bool:
    made_here = getattr(value, "__module__", "") == module.__name__
    return not name.startswith("_") and made_here and (inspect.isclass(value) or inspect.isfunction(value))


def entry_of(module: str, name: str, value: Any) -> NameEntry:
    """Return the `NameEntry` of a value."""
    if inspect.isclass(value):
        return NameEntry(
            module, name, "class", signature_of(value), own_doc(value), tuple(_members(module, name, value))
        )
    if callable(value):
        return NameEntry(module, name, "function", signature_of(value), inspect.getdoc(value) or "")
    return NameEntry(module, name, "value", _short(value), "")


def _members(module: str, name: str, kind: type) -> Iterator[NameEntry]:
    """Yield those methods and properties of a class that are public, defined in this package, and shown."""
    own = [
        member
        for member in dir(kind)
        if not member.startswith("_") and _owner(kind, member).__module__.startswith("tinker_sync")
    ]
    hidden = _hidden(kind)
    for member in own:
        plain = member.removesuffix("_async")
        if member in hidden or (member != plain and plain in own) or _is_common(kind, member):
            continue
        static = inspect.getattr_static(kind, member)
        value = getattr(kind, member)
        doc = inspect.getdoc(static) or inspect.getdoc(value) or ""
        note = f"also as `{member}_async`, to be awaited" if f"{member}_async" in own else ""
        if isinstance(static, property):
            yield NameEntry(module, f"{name}.{member}", "property", "", doc, note=note)
        elif callable(value):
            yield NameEntry(module, f"{name}.{member}", "method", signature_of(value), doc, note=note)


def _owner(kind: type, member: str) -> type:
    return next(base for base in kind.__mro__ if member in vars(base))


def _hidden(kind: type) -> frozenset[str]:
    """Return the methods of a class that the page leaves out.

    The page leaves out methods of futures that only the runtime calls. For clients that are futures, it also
    leaves out inherited methods except `result` and `exception`, because `APIFuture` has its own entry.
    """
    from tinker_sync.runtime import futures

    if not issubclass(kind, futures.APIFuture):
        return frozenset()
    inherited = dir(futures.APIFuture) if kind is not futures.APIFuture else []
    return futures._NOT_FOR_USERS | {name for name in inherited if name not in ("result", "exception")}


def _is_common(kind: type, member: str) -> bool:
    """Return True for a method that all values of the API inherit."""
    from tinker_sync.types._model import Model

    return issubclass(kind, Model) and hasattr(Model, member)


def own_doc(kind: type) -> str:
    """Return the docstring of a class itself, not one that it inherits."""
    doc = vars(kind).get("__doc__")
    return inspect.cleandoc(doc) if doc else ""


def signature_of(value: Any) -> str:
    """Return the parameters as text, without `self`, internal parameters and the modules of types.

    >>> def sample(self, count: int = 1, *, seed: tinker_sync.types.Seed | None = None) -> int: ...
    >>> signature_of(sample)
    '(count: int = 1, *, seed: Seed | None = None) -> int'
    """
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parts = []
    star = False
    for each in signature.parameters.values():
        if each.name in ("self", "cls", "_holder", "unknown"):
            continue
        if each.kind is each.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        stars = "*" * ((each.kind is each.VAR_POSITIONAL) + 2 * (each.kind is each.VAR_KEYWORD))
        star = star or stars == "*"
        note = "" if each.annotation is each.empty else f": {_type_text(each.annotation)}"
        default = "" if each.default is each.empty else f" = {_short(repr(each.default))}"
        parts.append(f"{stars}{each.name}{note}{default}")
    gives = signature.return_annotation
    given = "" if gives is signature.empty or inspect.isclass(value) else f" -> {_type_text(gives)}"
    return f"({', '.join(parts)}){given}"


def _type_text(annotation: Any) -> str:
    if isinstance(annotation, str):
        return _short(annotation)
    return _short(inspect.formatannotation(annotation))


def _short(value: Any) -> str:
    text = re.sub(r"\b(?:tinker_sync|typing|collections)\.(?:\w+\.)*(?=\w)", "", str(value))
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return text if len(text) < 300 else f"{text[:297]}…"
