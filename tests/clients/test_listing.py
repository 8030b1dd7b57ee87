"""Long lists are fetched lazily, page by page, and are complete although they change meanwhile."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
from support.shifting_lists import Change, ListServer
from support.tinker_stub import Answer, StubServer

import tinker_sync
from tinker_sync import errors
from tinker_sync.clients.rest import RestClient
from tinker_sync.clients.rest.listing import Listing, Page

ALL = 5_500
PAGES = 6
"""Pages of a thousand that overlap by sixteen."""
ROUNDS = int(os.environ.get("LISTING_ROUNDS", "30"))
KINDS = ("iter_user_checkpoints", "iter_training_runs", "iter_sessions")


@contextmanager
def client_of(server: ListServer) -> Iterator[RestClient]:
    with (
        StubServer(server),
        tinker_sync.ServiceClient(base_url=server.url, api_key="tml-list") as service,  # type: ignore[attr-defined]
    ):
        yield RestClient(service.holder)


def name_of(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    return str(getattr(entry, "training_run_id", None) or entry.tinker_path.rpartition("/")[2])


# ------------------------------------------------------------------------------------------- laziness


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_list_takes_no_more_pages_than_it_has(kind: str) -> None:
    server = ListServer(ALL)
    with client_of(server) as rest:
        listed = getattr(rest, kind)()
        assert server.asked_for() == []
        first = next(listed)
        assert (name_of(first), server.asked_for()) == ("e-000000", [(1000, 0)])
        assert listed.total == (None if kind == "iter_sessions" else ALL)
        names = ["e-000000", *(name_of(entry) for entry in listed)]
    assert names == server.entries
    assert len(server.asked_for()) == PAGES


def test_the_next_page_comes_while_this_one_is_used() -> None:
    server = ListServer(3000)
    with client_of(server) as rest:
        listed = rest.iter_user_checkpoints()
        next(listed)
        next(listed)
        server.await_asked("/checkpoints", 2)
        assert len(server.asked_for()) == 2
        listed.close()
        assert list(listed) == []
    assert len(server.asked_for()) == 2


def test_leaving_a_list_early_requests_no_more_pages() -> None:
    server = ListServer(3000)
    with client_of(server) as rest:
        assert len(list(islice(rest.iter_user_checkpoints(), 1))) == 1
        for entry in rest.iter_training_runs():
            assert entry.training_run_id == "e-000000"
            break
    assert server.asked_for() == [(1000, 0), (1000, 0)]


@pytest.mark.parametrize(
    ("limit", "asked"), [(0, []), (7, [(7, 0)]), (1000, [(1000, 0)]), (1500, [(1000, 0), (1000, 984)])]
)
def test_no_more_than_the_limit(limit: int, asked: list[tuple[int, int]]) -> None:
    server = ListServer(3000)
    with client_of(server) as rest:
        listed = rest.iter_user_checkpoints(limit=limit)
        assert [name_of(entry) for entry in listed] == server.entries[:limit]
        assert listed.total == (3000 if limit else None)
    assert server.asked_for() == asked


def test_a_limit_below_zero_is_refused() -> None:
    with pytest.raises(errors.InvalidInputError, match="limit"):
        Listing(_unused, _unused, str, limit=-1)


# ------------------------------------------------------------------------------------------- lists that
# change


def vanish(*numbers: int) -> Change:
    def change(entries: list[Any]) -> None:
        gone = {f"e-{number:06}" for number in numbers}
        entries[:] = [entry for entry in entries if entry not in gone]

    return change


def appear(count: int) -> Change:
    def change(entries: list[Any]) -> None:
        entries[:0] = [f"new-{len(entries)}-{number}" for number in range(count)]

    return change


def to_front(number: int) -> Change:
    def change(entries: list[Any]) -> None:
        entries.remove(f"e-{number:06}")
        entries.insert(0, f"e-{number:06}")

    return change


def both(*changes: Change) -> Change:
    return lambda entries: [change(entries) for change in changes]


CHANGES: dict[str, dict[int, Change]] = {
    "some new": {1: appear(3), 3: appear(40)},
    "a page of new": {2: appear(984)},
    "pages of new": {2: appear(2500)},
    "some seen gone": {2: vanish(3, 4, 5)},
    "many seen gone": {2: vanish(*range(500))},
    "all seen gone": {2: vanish(*range(1984))},
    "all seen and more gone": {3: vanish(*range(2960)), 4: vanish(*range(2960, 2990))},
    "the end gone": {3: vanish(*range(3500, 5000))},
    "nearly everything gone": {4: vanish(*range(3900))},
    "seen gone and new come": {2: both(vanish(*range(100)), appear(100)), 3: both(vanish(1500), appear(70))},
    "one used": {2: to_front(4500)},
    "one used and one gone": {2: both(to_front(4500), vanish(7))},
    "all around an anchor gone": {1: vanish(*range(900, 1100)), 2: vanish(*range(1700, 2000))},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["iter_user_checkpoints", "iter_sessions"])  # with a total and without
def test_rows_that_stay_come_once_among_changes(kind: str, change: str) -> None:
    if (kind, change) == ("iter_sessions", "one used and one gone"):
        pytest.skip("unseen without a count, as the module says")
    server = ListServer(5000, then=CHANGES[change])
    before = set(server.entries)
    with client_of(server) as rest:
        names = [name_of(entry) for entry in getattr(rest, kind)()]
    stayed = before & set(server.entries)
    assert len(names) == len(set(names))
    assert stayed <= set(names)
    assert set(names) <= before | set(server.entries)
    assert len(server.asked_for()) <= 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_list_that_changes_all_the_time(kind: str) -> None:
    draw = random.Random(5)

    def change(entries: list[Any]) -> None:
        for _ in range(draw.randrange(40)):
            entries.pop(draw.randrange(len(entries)))
        appear(draw.randrange(40))(entries)

    server = ListServer(ALL, then=dict.fromkeys(range(1, 1000), change))
    before = set(server.entries)
    with client_of(server) as rest:
        names = [name_of(entry) for entry in getattr(rest, kind)()]
    assert len(names) == len(set(names))
    assert before & set(server.entries) <= set(names)
    assert len(server.asked_for()) <= 3 * PAGES


def test_random_changes_of_small_lists() -> None:
    for seed in range(ROUNDS):
        draw = random.Random(seed)
        entries = list(range(draw.randrange(60)))
        before, serial = set(entries), iter(range(1000, 100_000))

        def fetch(
            size: int, offset: int, entries: list[int] = entries, draw: Any = draw, serial: Any = serial
        ) -> Future[Any]:
            answer = answered((entries[offset : offset + size], len(entries)))
            for _ in range(draw.choice((0, 0, 0, 1, 2, 5))):
                if entries and draw.random() < 0.5:
                    entries.pop(draw.randrange(len(entries)))
                else:
                    entries.insert(0, next(serial))
            return answer

        with_total = draw.random() < 0.5
        # Without a count, pages of four that twice move by three look like those of a server without offsets.
        sizes = (4, 9, 17, 40) if with_total else (9, 17, 40)
        read = (lambda answer: Page(*answer)) if with_total else (lambda answer: Page(answer[0]))
        got = list(Listing(fetch, read, str, page_size=draw.choice(sizes)))
        assert len(got) == len(set(got)), seed
        assert before & set(entries) <= set(got), (seed, before & set(entries) - set(got))


# ------------------------------------------------------------------------------------------- other servers


@pytest.mark.parametrize("kind", KINDS)
def test_servers_that_give_less_than_asked_for(kind: str) -> None:
    server = ListServer(950, most=200)
    with client_of(server) as rest:
        assert [name_of(entry) for entry in getattr(rest, kind)()] == server.entries


def test_servers_that_refuse_to_give_that_many() -> None:
    server = ListServer(950, refuse_over=500)
    with client_of(server) as rest:
        assert [name_of(entry) for entry in rest.iter_training_runs()] == server.entries
    assert [size for size, _ in server.asked_for()][:3] == [1000, 100, 100]


@pytest.mark.parametrize("kind", ["iter_user_checkpoints", "iter_sessions"])
def test_servers_that_know_no_pages(kind: str) -> None:
    server = ListServer(950, offsets=False, totals=False)
    with client_of(server) as rest:
        assert [name_of(entry) for entry in getattr(rest, kind)()] == server.entries
    assert len(server.asked_for()) <= 4


def test_the_checkpoints_of_a_run_have_no_pages() -> None:
    server = ListServer(2500)
    with client_of(server) as rest:
        listed = rest.iter_checkpoints("run")
        assert [name_of(entry) for entry in listed] == server.entries
        assert listed.total == 2500
        assert len(server.asked("/training_runs/run/checkpoints")) == 1
        assert len(list(rest.iter_checkpoints("run", limit=3))) == 3
        with pytest.raises(errors.InvalidInputError):
            rest.iter_checkpoints("")


def test_pages_in_no_order_at_all_come_to_an_end() -> None:
    draw, pages = random.Random(1), []

    def fetch(size: int, offset: int) -> Future[Any]:
        pages.append(offset)
        return answered(draw.sample(range(1000), 50))

    got = list(Listing(fetch, lambda answer: Page(answer, 1000), str, page_size=50))
    assert len(got) == len(set(got))
    assert len(pages) < 1000


def test_an_entry_that_a_page_repeats_comes_once() -> None:
    listed = Listing(lambda *_: answered(["a", "b", "a"]), lambda answer: Page(answer, 3), str)
    assert list(listed) == ["a", "b"]


def test_an_error_comes_after_what_was_read() -> None:
    server = ListServer(2500)
    server.script("/checkpoints", Answer(usual=True), Answer(403, {"detail": "no more"}))
    got: list[str] = []
    with client_of(server) as rest:
        listed = rest.iter_user_checkpoints()
        with pytest.raises(errors.PermissionDeniedError, match="no more"):
            got.extend(entry.tinker_path for entry in listed)
        assert list(listed) == []
    assert len(got) == 1000
    with client_of(ListServer(5)) as rest, pytest.raises(errors.InvalidInputError):
        rest.iter_sessions(access_scope="everybody's")  # type: ignore[arg-type]


def answered(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


_unused: Callable[..., Any] = lambda *_: None  # noqa: E731
