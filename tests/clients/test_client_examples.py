"""Every public method of the clients has an example in its docstring, which the suite runs as a doctest.

A `..._async` method has no example of its own. These tests run the example of the plain method with the
`..._async` method in its place.
"""

from __future__ import annotations

import asyncio
import doctest
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import tinker_sync

pytestmark = pytest.mark.usefixtures("one_embedded_server")

CLIENTS = (
    tinker_sync.ServiceClient,
    tinker_sync.TrainingClient,
    tinker_sync.SamplingClient,
    tinker_sync.RestClient,
    tinker_sync.AdminClient,
)

NOT_FOR_USERS = {*dir(tinker_sync.APIFuture)} - {*dir(tinker_sync.APIFuture())}


def public_names(client: type) -> Iterator[tuple[str, type]]:
    """Yield each public name of a client class, with the class of this package that defines it."""
    for name in dir(client):
        owner = next(base for base in client.__mro__ if name in vars(base))
        ours = owner.__module__.startswith("tinker_sync")
        # A removed name is listed too, but cannot be read.
        if ours and not name.startswith("_") and name not in NOT_FOR_USERS and hasattr(client, name):
            yield name, owner


def examples() -> dict[tuple[type, str], str]:
    """Return the docstrings of the clients' public names, by pairs of the defining class and the name.

    A name that several clients inherit from one class has one entry.
    """
    return {
        (owner, name): inspect.getdoc(inspect.getattr_static(owner, name)) or ""
        for client in CLIENTS
        for name, owner in public_names(client)
    }


EXAMPLES = examples()
TWINS = {place: doc for place, doc in EXAMPLES.items() if (place[0], place[1][:-6]) in EXAMPLES}


def test_futures_have_no_other_names_than_those_for_users() -> None:
    names = {name for name in dir(tinker_sync.APIFuture()) if not name.startswith("_")}
    assert names == {
        "add_done_callback", "cancel", "cancelled", "coroutine", "done", "exception", "failure", "future",
        "request_id", "request_ids", "result", "result_async", "running", "status", "timeline",
    }  # fmt: skip


def test_the_clients_are_large() -> None:
    assert len(EXAMPLES) > 120
    assert len(TWINS) > 40


def test_every_public_method_has_an_example() -> None:
    bare = [f"{owner.__name__}.{name}" for (owner, name), doc in EXAMPLES.items() if ">>> " not in doc]
    twins = {f"{owner.__name__}.{name}" for owner, name in TWINS}
    assert sorted(set(bare) - twins) == []


def test_every_awaited_method_names_the_one_with_the_example() -> None:
    assert [place for place, doc in TWINS.items() if f"`{place[1][:-6]}`" not in doc] == []


class Awaiting:
    """A double of a plain method. It awaits the `..._async` method, and returns the same kind of result."""

    def __init__(self, owner: type, name: str) -> None:
        self.method, self.twin = vars(owner)[name], vars(owner)[f"{name}_async"]
        self.gives_future = str(inspect.signature(self.method).return_annotation).startswith("APIFuture")
        self.awaited = 0
        self._inside = False

    def call(self, client: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inside:  # the `..._async` method calls the method
            return self.method(client, *args, **kwargs)
        self._inside = True
        self.awaited += 1
        try:
            value = asyncio.run(self.twin(client, *args, **kwargs))
        finally:
            self._inside = False
        if not self.gives_future or isinstance(value, tinker_sync.APIFuture):
            return value
        future: tinker_sync.APIFuture[Any] = tinker_sync.APIFuture()
        future.resolve(value)
        return future


@pytest.mark.parametrize(("owner", "name"), TWINS, ids=[f"{owner.__name__}.{name}" for owner, name in TWINS])
def test_the_awaited_method_gives_what_the_example_shows(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name.removesuffix("_async")
    text = EXAMPLES[owner, name]
    if "import tinker_sync, torch" in text:
        pytest.importorskip("torch")
    awaiting = Awaiting(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: awaiting.call(*args, **kwargs))
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    said: list[str] = []
    with warnings.catch_warnings():
        failed = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append).failed
    assert not failed, "".join(said)
    assert awaiting.awaited  # the example calls the method
