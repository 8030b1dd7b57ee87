"""The queue of events: numbered, bounded, each kind of failure once."""

from __future__ import annotations

from support.crowd import together

from tinker_sync.telemetry.buffer import Draft, EventBuffer


def draft(name: str = "SESSION_START", key: object = None) -> Draft:
    return Draft(name, "INFO", 0.0, key=key)


def indexes(buffer: EventBuffer, most: int = 100) -> list[int]:
    return [event.index for event in buffer.take(most)]


def test_numbers_follow_each_other_over_all_batches() -> None:
    buffer = EventBuffer()
    for _ in range(5):
        assert buffer.add(draft())
    assert (indexes(buffer, 3), indexes(buffer), indexes(buffer)) == ([0, 1, 2], [3, 4], [])


def test_what_does_not_fit_is_dropped_and_takes_no_number() -> None:
    buffer = EventBuffer(capacity=2)
    assert [buffer.add(draft()) for _ in range(4)] == [True, True, False, False]
    assert repr(buffer) == "<EventBuffer 2 waiting, 2 dropped>"
    buffer.take(1)
    assert buffer.add(draft())
    assert indexes(buffer) == [1, 2]


def test_the_same_failure_waits_once() -> None:
    buffer = EventBuffer()
    assert [buffer.add(draft(key="a")) for _ in range(3)] == [True, False, False]
    assert buffer.add(draft(key="b"))
    assert len(buffer.take(1)) == 1
    assert buffer.add(draft(key="a"))  # the first is on its way
    assert not buffer.add(draft(key="b"))


def test_what_could_not_be_sent_comes_first_again() -> None:
    buffer = EventBuffer()
    for key in "abc":
        buffer.add(draft(key=key))
    taken = buffer.take(2)
    buffer.put_back(taken)
    assert not buffer.add(draft(key="a"))
    again = buffer.take(100)
    assert again[:2] == taken  # their ids too, by which the service tells a repetition
    assert [event.index for event in again] == [0, 1, 2]


def test_a_closed_buffer_keeps_nothing() -> None:
    buffer = EventBuffer()
    buffer.add(draft())
    taken = buffer.take(1)
    buffer.add(draft())
    buffer.close()
    buffer.put_back(taken)
    assert (buffer.add(draft()), len(buffer), buffer.closed) == (False, 0, True)


def test_a_child_begins_anew() -> None:
    buffer = EventBuffer()
    buffer.add(draft(key="a"))
    buffer._lock.acquire()
    buffer.renew_after_fork()
    assert len(buffer) == 0
    assert buffer.add(draft(key="a"))
    assert indexes(buffer) == [0]


def test_many_threads_draw_dense_numbers() -> None:
    buffer = EventBuffer(capacity=10_000)
    together(*[lambda: [buffer.add(draft()) for _ in range(200)]] * 16)
    assert indexes(buffer, 10_000) == list(range(3200))
