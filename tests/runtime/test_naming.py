"""The name of the running public method, which jobs take to other threads; and unread failures."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tinker_sync.runtime.naming import (
    carried,
    current,
    named,
    names_requests,
)


class Base:
    def inherited(self) -> str:
        return current()


@names_requests
class Client(Base):
    """A client class whose public methods set the name and return it."""

    def outer(self) -> list[str]:
        return [current(), self.inner(), current()]

    def inner(self) -> str:
        """Return the current name."""
        return current()

    def refuse(self, *, message: str = "no") -> None:
        raise ValueError(message)

    async def slowly_async(self) -> list[str]:
        before = current()
        await asyncio.sleep(0)
        return [before, self.inner()]

    def _private(self) -> str:
        return current()

    @classmethod
    def made(cls) -> str:
        return current()

    @property
    def shown(self) -> str:
        return current()


def test_the_outermost_method_counts() -> None:
    assert Client().outer() == ["Client.outer"] * 3
    assert Client().inner() == "Client.inner"
    assert current() == ""


def test_a_subclass_of_the_user_changes_no_name() -> None:
    class Mine(Client):
        def inner(self) -> str:
            return super().inner()

    assert Mine().inner() == "Client.inner"
    assert Mine().outer() == ["Client.outer"] * 3


def test_signatures_and_texts_stay() -> None:
    assert str(inspect.signature(Client.refuse)) == "(self, *, message: 'str' = 'no') -> 'None'"
    assert (Client.inner.__name__, Client.inner.__doc__) == ("inner", "Return the current name.")
    assert inspect.iscoroutinefunction(Client.slowly_async)


def test_a_wrong_call_and_a_pickle_name_the_client_and_not_its_base() -> None:
    with pytest.raises(TypeError, match=r"^Client.inherited\(\) got an unexpected keyword argument 'a'"):
        Client().inherited(a=1)  # type: ignore[call-arg]
    assert pickle.loads(pickle.dumps(Client.inherited)) is Client.inherited


def test_a_failure_leaves_no_name_and_one_frame_more() -> None:
    with pytest.raises(ValueError, match="no") as caught:
        Client().refuse()
    assert current() == ""
    assert [entry.name for entry in caught.traceback][1:] == ["naming", "refuse"]


def test_coroutines_side_by_side_keep_their_names_apart() -> None:
    async def both() -> Any:
        return await asyncio.gather(Client().slowly_async(), asyncio.to_thread(Client().inner)), current()

    (slow, quick), after = asyncio.run(both())
    assert slow == ["Client.slowly_async"] * 2
    assert quick == "Client.inner"
    assert after == ""


def test_a_job_takes_the_name_to_another_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        with named("Client.outer"):
            bare, job = pool.submit(current), pool.submit(carried(current))
        assert (bare.result(120), job.result(120)) == ("", "Client.outer")
        assert pool.submit(current).result(120) == ""


# ------------------------------------------------------------------------------------------- unread failures
