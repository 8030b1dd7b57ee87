"""The name of the running public method, which jobs take to other threads; and unread failures."""

from __future__ import annotations

import asyncio
import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.raising import raising

from tinker_sync._base.events import CostEstimate, TokensUsed
from tinker_sync._base.naming import carried, current, named, names_requests
from tinker_sync.errors import BudgetExceededError
from tinker_sync.insight.budget import Budget
from tinker_sync.insight.meter import Meter, TokenCounts
from tinker_sync.insight.prices import PriceTable
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.spending import SpendGuard


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


# ---- Limiters admit calls before they are sent, and get their usage at the end; no reservation remains
class Limiter:
    """A limiter that admits all calls or none, and records its calls."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses = refuses
        self.told: list[object] = []
        self.held: set[object] = set()

    def hold(self, plan: CostEstimate) -> object:
        if self.refuses:
            raise BudgetExceededError("no", limit=0, spent=0, unit="tokens")
        key = object()
        self.held.add(key)
        return key

    def settle(self, key: object, used: TokensUsed, *, last: bool) -> None:
        self.told.append((used.trained, last))
        if last:
            self.held.discard(key)

    def release(self, key: object) -> None:
        self.held.discard(key)


def used(count: int) -> TokensUsed:
    return TokensUsed(model="m", trained=count)


def plan() -> CostEstimate:
    return CostEstimate(model="m", trained=9)


def test_the_last_of_several_results_is_marked() -> None:
    heard: list[TokensUsed] = []
    guard, limiter = SpendGuard(heard.append), Limiter()
    guard.attach(limiter)
    with guard.reserve(plan) as reservation:
        reservation.parts = 3
    for count in (1, 2, 3):
        assert limiter.held
        for _ in range(2):  # a result that is read twice counts once
            reservation.settle(used(count), count)
    assert limiter.told == [(1, False), (2, False), (3, True)]
    assert limiter.held == set()
    assert [each.trained for each in heard] == [1, 2, 3]


def test_what_cannot_begin_gives_back_what_was_set_aside() -> None:
    guard, limiter = SpendGuard(lambda _: None), Limiter()
    guard.attach(limiter)
    with pytest.raises(KeyError), guard.reserve(plan):
        raise KeyError
    assert limiter.held == set()


def test_what_one_has_set_aside_does_not_stay_when_the_next_refuses() -> None:
    guard, first, second = SpendGuard(lambda _: None), Limiter(), Limiter(refuses=True)
    guard.attach(first)
    detach = guard.attach(second)
    with pytest.raises(BudgetExceededError):
        guard.reserve(plan)
    assert first.held == set()
    detach()
    with guard.reserve(plan):
        assert len(first.held) == 1


def test_a_failed_call_has_no_reservation_when_its_user_learns_of_the_failure() -> None:
    """The next call of the user, right after the failure, must not count the tokens of the failed one."""
    guard, limiter = SpendGuard(lambda _: None), Limiter()
    guard.attach(limiter)
    at_the_end: list[int] = []
    future: APIFuture[None] = APIFuture(when_done=(lambda _: at_the_end.append(len(limiter.held)),))
    with guard.reserve(plan) as reservation:
        reservation.follow(future)
    assert len(limiter.held) == 1
    future.fail(KeyError("gone"))
    assert at_the_end == [0]


def test_a_call_that_was_cancelled_before_its_reservation_keeps_none() -> None:
    guard, limiter = SpendGuard(lambda _: None), Limiter()
    guard.attach(limiter)
    future: APIFuture[None] = APIFuture()
    future.cancel()
    with guard.reserve(plan) as reservation:
        reservation.follow(future)
    assert limiter.held == set()


def test_the_limits_at_the_time_of_the_call_count() -> None:
    guard, before, after = SpendGuard(lambda _: None), Limiter(), Limiter()
    guard.attach(before)
    of_the_call = guard.limiters
    guard.attach(after)
    guard.reserve(plan, of_the_call)
    assert (len(before.held), len(after.held)) == (1, 0)


def test_without_a_limit_nothing_is_computed() -> None:
    with SpendGuard(lambda _: None).reserve(raising(AssertionError("nobody has asked"))) as reservation:
        reservation.settle(used(1))


def test_a_forked_child_has_used_nothing_and_has_nothing_under_way() -> None:
    meter = Meter()
    meter.observe(used(5))
    meter.renew_after_fork()
    assert meter.by_model() == {}
    budget = Budget(tokens=10)
    key = budget.hold(CostEstimate(model="m", trained=8))
    budget.settle(key, used(3), last=False)
    budget.renew_after_fork()
    budget.hold(CostEstimate(model="m", trained=7))
    with pytest.raises(BudgetExceededError, match="3 are spent and up to 7 are under way"):
        budget.hold(CostEstimate(model="m", trained=1))


def test_tokens_without_a_price_leave_the_cost_of_the_others() -> None:
    table = PriceTable.of({"base": {"prompt": 2.0}})
    budget = Budget(usd=9.0, prices=table, base_model=lambda _: "base")
    used = TokensUsed(model="m", trained=5, prompt=2_000_000, cached=1_000_000, sampled=7)
    budget.settle(budget.hold(CostEstimate(model="m", prompt=3_000_000)), used, last=True)
    assert (budget.spent_tokens, budget.spent_usd) == (3_000_012, 6.0)
    with pytest.raises(BudgetExceededError):
        budget.hold(CostEstimate(model="m", prompt=2_000_000))


def test_models_are_named_after_those_they_are_like() -> None:
    from tinker_sync._base.events import ModelNamed

    asked: list[str] = []

    def ask(model: str) -> str | None:
        asked.append(model)
        return None

    meter = Meter(ask)
    meter.observe(ModelNamed(model="s:train:0", base_model="org/base"))
    meter.observe(ModelNamed(model="s:sample:0", like="s:train:0"))
    for model in ("s:sample:0", "s:sample:1"):
        meter.observe(TokensUsed(model=model, sampled=2))
    assert meter.by_model() == {"org/base": TokenCounts(sampled=2), None: TokenCounts(sampled=2)}
    assert asked == ["s:sample:1"]
