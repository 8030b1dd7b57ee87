"""The queue of events: numbers, capacity, keys."""

from __future__ import annotations

from support.crowd import together

from tinker_sync.telemetry.reports import Draft, EventBuffer


def draft(name: str = "SESSION_START", key: object = None) -> Draft:
    return Draft(name, "INFO", 0.0, key=key)


def indexes(buffer: EventBuffer, most: int = 100) -> list[int]:
    return [event.index for event in buffer.take(most)]


def test_numbers_continue_over_batches() -> None:
    buffer = EventBuffer()
    for _ in range(5):
        assert buffer.add(draft())
    assert (indexes(buffer, 3), indexes(buffer), indexes(buffer)) == ([0, 1, 2], [3, 4], [])


def test_excess_events_are_dropped_without_a_number() -> None:
    buffer = EventBuffer(capacity=2)
    assert [buffer.add(draft()) for _ in range(4)] == [True, True, False, False]
    assert repr(buffer) == "<EventBuffer 2 waiting, 2 dropped>"
    buffer.take(1)
    assert buffer.add(draft())
    assert indexes(buffer) == [1, 2]


def test_one_event_of_a_key_waits() -> None:
    buffer = EventBuffer()
    assert [buffer.add(draft(key="a")) for _ in range(3)] == [True, False, False]
    assert buffer.add(draft(key="b"))
    assert len(buffer.take(1)) == 1
    assert buffer.add(draft(key="a"))  # the first has left the queue
    assert not buffer.add(draft(key="b"))


def test_put_back_events_come_first() -> None:
    buffer = EventBuffer()
    for key in "abc":
        buffer.add(draft(key=key))
    taken = buffer.take(2)
    buffer.put_back(taken)
    assert not buffer.add(draft(key="a"))
    again = buffer.take(100)
    assert again[:2] == taken  # with the same ids
    assert [event.index for event in again] == [0, 1, 2]


def test_a_put_back_event_gives_way_to_a_newer_one_of_its_key() -> None:
    buffer = EventBuffer()
    for key in ("a", None, "b"):
        buffer.add(draft(key=key))
    taken = buffer.take(3)
    buffer.add(draft(key="a"))
    buffer.put_back(taken)
    assert [event.draft.key for event in buffer.take(100)] == [None, "b", "a"]


def test_closed_buffer_keeps_no_events() -> None:
    buffer = EventBuffer()
    buffer.add(draft())
    taken = buffer.take(1)
    buffer.add(draft())
    buffer.close()
    buffer.put_back(taken)
    assert not buffer.add(draft())
    assert repr(buffer) == "<EventBuffer 0 waiting, 0 dropped, closed>"


def test_child_process_begins_empty() -> None:
    buffer = EventBuffer()
    buffer.add(draft(key="a"))
    buffer._lock.acquire()
    buffer.renew_after_fork()
    assert len(buffer) == 0
    assert buffer.add(draft(key="a"))
    assert indexes(buffer) == [0]


def test_threads_draw_dense_numbers() -> None:
    buffer = EventBuffer(capacity=10_000)
    together(*[lambda: [buffer.add(draft()) for _ in range(200)]] * 16)
    assert indexes(buffer, 10_000) == list(range(3200))
