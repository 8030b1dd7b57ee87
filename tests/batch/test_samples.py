"""`SamplingClient.map`: prompts in flight, the order of items, failures, its file, and leaving the loop."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.orders import fork

import tinker_sync
from tinker_sync import InvalidInputError, ModelInput, SampledSequence, SampleResponse, SamplingParams
from tinker_sync.batch.results import ResultsFile
from tinker_sync.batch.samples import Order, Window, map_samples
from tinker_sync.errors import (
    AuthenticationError,
    BudgetExceededError,
    ClientClosedError,
    ConfigurationError,
    TinkerError,
)
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.testing import FaultPlan, LocalServer, faults

PARAMS = SamplingParams(max_tokens=2)
PATIENCE_S = 120.0


class ByHand:
    """A double of a sampling client. The test resolves its futures with `answer`, unless it is `at_once`."""

    def __init__(self, *, at_once: bool = False) -> None:
        self.futures: list[APIFuture[SampleResponse]] = []
        self.prompts: list[list[int]] = []
        self.refusal: Exception | None = None
        self._at_once = at_once

    def sample(self, prompt: ModelInput, num_samples: int, sampling_params: Any, **_: Any) -> Any:
        if self.refusal is not None:
            raise self.refusal
        if prompt.length == 0:
            raise InvalidInputError("prompt: is empty")
        future: APIFuture[SampleResponse] = APIFuture()
        self.futures.append(future)
        self.prompts.append(prompt.to_ints())
        if self._at_once:
            self.answer(len(self.futures) - 1)
        return future

    def get_tokenizer(self) -> Any:
        return tinker_sync.get_tokenizer("tinker-sync/tiny")

    def answer(self, index: int) -> None:
        tokens = np.array([self.prompts[index][0]], dtype=np.int32)
        self.futures[index].resolve(SampleResponse([SampledSequence("stop", None, tokens)]))


def start(client: Any, prompts: Any, **options: Any) -> Any:
    window = Window(
        options.pop("max_in_flight", 4), options.pop("ordered", True), options.pop("on_error", "return")
    )
    order = Order(client, options.pop("params", PARAMS), 1, {}, options.pop("tokenizer", None))
    return map_samples(
        prompts, order, window, **{"save_to": None, "progress": False, "total": None, **options}
    )


def first_token(item: Any) -> int:
    return int(item.result().sequences[0].tokens[0])


class Pulled:
    """An iterable of prompts that counts the prompts taken from it."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.pulled = 0

    def __iter__(self) -> Iterator[list[int]]:
        for index in range(self._count):
            self.pulled += 1
            yield [index]


# -------------------------------------------------------------------------------------- the window
@pytest.mark.parametrize("ordered", [True, False])
def test_no_prompt_is_pulled_further_ahead_than_the_window(ordered: bool) -> None:
    client, prompts = ByHand(at_once=True), Pulled(50)
    got = 0
    for _ in start(client, prompts, max_in_flight=3, ordered=ordered):
        got += 1
        assert prompts.pulled <= got + 3
    assert (got, prompts.pulled) == (50, 50)


def test_a_map_that_is_dropped_before_its_first_item_warns_at_the_line_of_the_call(tmp_path: Path) -> None:
    client, place = ByHand(at_once=True), tmp_path / "out.jsonl"
    with pytest.warns(RuntimeWarning, match=r"sampled nothing.*for item in") as caught:
        start(client, [[1]], save_to=place)
    assert (caught[0].filename, client.prompts) == (__file__, [])
    assert len(list(start(client, [[1]], save_to=place))) == 1  # without a warning
    for _ in start(client, [[1], [2]]):
        break


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"id": 7, "question": "2 + 3?", "answer": "5"}], r"row\['question'\] for row in rows"),
        ([{"role": "user", "content": "2 + 3?"}], r"map\(\[messages\]"),
        ([{}], "got a dictionary"),
    ],
)
def test_rows_of_dictionaries_end_the_batch_with_advice(rows: Any, words: str) -> None:
    client = ByHand(at_once=True)
    items = start(client, [[1], *rows * 3])
    assert next(items).ok
    with pytest.raises(InvalidInputError, match=words):
        next(items)
    assert client.prompts == [[1]]


def test_the_window_is_full_while_the_caller_works() -> None:
    client = ByHand()
    items = start(client, ([n] for n in range(9)), max_in_flight=3, ordered=False)
    with threaded(client, [1]):
        next(items)
    assert len(client.futures) == 4  # three in flight, and the one that was yielded


def test_items_come_in_order_whatever_arrives_first() -> None:
    client = ByHand()
    items = start(client, [[5], [6], [7]])
    with threaded(client, [2, 1, 0]):
        assert [(item.index, first_token(item)) for item in items] == [(0, 5), (1, 6), (2, 7)]


def test_items_come_as_they_arrive() -> None:
    client = ByHand()
    items = start(client, [[5], [6], [7]], ordered=False)
    with threaded(client, [2, 1, 0]):
        assert [(item.index, first_token(item)) for item in items] == [(2, 7), (1, 6), (0, 5)]


class threaded:  # noqa: N801  # it reads like a function
    """A context in which another thread answers samples in a given order, once all of them are started."""

    def __init__(self, client: ByHand, order: list[int]) -> None:
        self._thread = threading.Thread(target=self._answer, args=(client, order))

    def _answer(self, client: ByHand, order: list[int]) -> None:
        patience = threading.Event()
        for index in order:
            while len(client.futures) <= max(order):
                patience.wait(0.001)
            client.answer(index)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: Any) -> None:
        self._thread.join(PATIENCE_S)


# -------------------------------------------------------------------------------------- failures
def test_a_failed_prompt_is_an_item() -> None:
    client = ByHand(at_once=True)
    items = list(start(client, [[1], [], [2], b"no tokens", [3]]))
    assert [item.ok for item in items] == [True, False, True, False, True]
    assert isinstance(items[1].error, InvalidInputError)
    assert items[1].prompt == []
    with pytest.raises(InvalidInputError, match="is empty"):
        items[1].result()


def test_a_failed_prompt_can_end_the_batch_and_names_its_place() -> None:
    client = ByHand(at_once=True)
    items = start(client, [[1], [], [2]], on_error="raise")
    assert next(items).index == 0
    with pytest.raises(InvalidInputError, match=r"prompt: is empty \(prompts\[1\]\)"):
        next(items)


@pytest.mark.parametrize(
    "refusal",
    [
        ClientClosedError("closed"),
        BudgetExceededError("spent", limit=1, spent=1, unit="tokens"),
        TinkerError("no session"),
    ],
)
def test_an_error_that_ends_the_client_is_raised_after_the_items_under_way(refusal: TinkerError) -> None:
    client = ByHand(at_once=True)

    def prompts() -> Iterator[list[int]]:
        yield [1]
        yield [2]
        client.refusal = refusal
        yield [3]
        raise AssertionError("nothing is pulled after the end of the client")

    items = start(client, prompts())
    assert [next(items).index, next(items).index] == [0, 1]
    with pytest.raises(type(refusal)):
        next(items)


def test_a_refused_key_does_not_fail_every_prompt_one_by_one() -> None:
    client, prompts = ByHand(), Pulled(1000)
    items = start(client, prompts, max_in_flight=2)
    failure = AuthenticationError.__new__(AuthenticationError)
    thread = threading.Thread(target=lambda: refuse(client, failure))
    thread.start()
    with pytest.raises(AuthenticationError):
        list(items)
    thread.join(PATIENCE_S)
    assert prompts.pulled < 10


def refuse(client: ByHand, failure: Exception) -> None:
    patience = threading.Event()
    while len(client.futures) < 2:
        patience.wait(0.001)
    for future in client.futures:
        future.fail(failure)


# -------------------------------------------------------------------------------------- leaving the loop
@pytest.mark.parametrize("way", ["close", "drop", "interrupt"])
def test_leaving_cancels_what_is_under_way(way: str) -> None:
    client = ByHand()
    prompts = Pulled(100)
    items = start(client, prompts, max_in_flight=4, ordered=False)
    with threaded(client, [0]):
        next(items)
    if way == "close":
        items.close()
    elif way == "drop":
        del items
    else:
        with pytest.raises(KeyboardInterrupt):
            items.throw(KeyboardInterrupt())
    assert [future.cancelled() for future in client.futures] == [False, True, True, True, True]
    assert prompts.pulled == 5


# -------------------------------------------------------------------------------------- the file
def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_restart_samples_the_rest_and_yields_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "out.jsonl"
    prompts = [[1], [2], [1], [1], [3]]  # equal prompts are separate prompts
    first = ByHand(at_once=True)
    assert [item.saved for item in start(first, prompts[:3], save_to=path)] == [False] * 3
    second = ByHand(at_once=True)
    again = list(start(second, prompts, save_to=path))
    assert second.prompts == [[1], [3]]
    assert [item.saved for item in again] == [True, True, True, False, False]
    assert [first_token(item) for item in again] == [1, 2, 1, 1, 3]
    assert sorted(line["index"] for line in lines(path)) == [0, 1, 2, 3, 4]
    assert list(start(third := ByHand(), prompts, save_to=path))
    assert third.prompts == []
    assert path.stat().st_mode & 0o111 == 0


def test_what_arrives_is_in_the_file_before_its_item_and_after_leaving(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    client = ByHand()
    items = start(client, [[1], [2], [3]], save_to=path, ordered=False)
    with threaded(client, [1]):
        assert next(items).index == 1
    assert [line["index"] for line in lines(path)] == [1]
    client.answer(2)  # the response has arrived, and the caller does not take its item
    items.close()
    assert [line["index"] for line in lines(path)] == [1, 2]


@pytest.mark.parametrize("change", ["prompt", "parameters"])
def test_a_file_of_another_batch_is_refused_with_the_place(tmp_path: Path, change: str) -> None:
    path = tmp_path / "out.jsonl"
    list(start(ByHand(at_once=True), [[1], [2]], save_to=path))
    before = path.read_bytes()
    prompts = [[1], [3]] if change == "prompt" else [[1], [2]]
    params = PARAMS if change == "prompt" else SamplingParams(max_tokens=3)
    place = "1" if change == "prompt" else "0"
    with pytest.raises(InvalidInputError, match=rf"out\.jsonl holds another prompt.* for prompts\[{place}\]"):
        list(start(ByHand(at_once=True), prompts, params=params, save_to=path))
    assert path.read_bytes() == before


def test_a_file_with_the_responses_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with LocalServer(model="tinker-sync/random") as server, server.service() as service:
        training = service.create_lora_training_client("tinker-sync/random")
        first, second = (training.save_weights_for_sampler(name).result().path for name in ("a", "b"))
        saved = list(service.create_sampling_client(first).map([[1], [2]], PARAMS, save_to=path))
        before = path.read_bytes()
        with pytest.raises(InvalidInputError, match=rf"of {first} for prompts\[0\], not of {second}"):
            list(service.create_sampling_client(second).map([[1], [2]], PARAMS, save_to=path))
        assert path.read_bytes() == before
        again = list(service.create_sampling_client(first).map([[1], [2]], PARAMS, save_to=path))
    assert [item.saved for item in (*saved, *again)] == [False, False, True, True]


def test_text_is_written_for_people(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    chat = [{"role": "user", "content": "Hi"}]
    items = list(start(ByHand(at_once=True), ["Hello", chat, [65]], save_to=path))
    tokenizer = tinker_sync.get_tokenizer("tinker-sync/tiny")
    assert items[0].texts == [items[0].result().sequences[0].text(tokenizer)]
    written = {line["index"]: line for line in lines(path)}
    assert written[0]["prompt"] == "Hello"
    assert written[1]["prompt"] == chat
    assert "prompt" not in written[2]
    assert written[0]["texts"] == items[0].texts


# -------------------------------------------------------------------------------------- a forked child
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_gets_no_items_of_its_parent_and_leaves_its_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    client = ByHand()
    items = start(client, [[5], [6], [7]], max_in_flight=2, save_to=path)
    with threaded(client, [0]):
        assert first_token(next(items)) == 5

    def work(tell: int) -> None:
        signal.alarm(60)  # ends a child that waits for ever
        try:
            next(items)
        except TinkerError as error:
            os.write(tell, str(error).encode())
        os._exit(0)

    pid, told = fork(work)
    assert os.waitpid(pid, 0)[1] == 0
    assert "begun before the process was forked" in told
    assert len(client.futures) == 3
    with threaded(client, [1, 2]):
        assert [first_token(item) for item in items] == [6, 7]
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == [0, 1, 2]


# -------------------------------------------------------------------------------------- arguments
@pytest.mark.parametrize(
    ("prompts", "options", "complaint"),
    [
        ("one text", {}, "prompts is one str; give a list"),
        (ModelInput.from_ints([1]), {}, "prompts is one ModelInput"),
        (3, {}, "prompts: expected a list or a generator"),
        ([[1]], {"max_in_flight": 0}, "max_in_flight: expected 1 or more, got 0"),
        ([[1]], {"max_in_flight": None}, "max_in_flight: expected 1 or more, got None"),
        ([[1]], {"max_in_flight": True}, "max_in_flight: expected 1 or more, got True"),
        ([[1]], {"on_error": "ignore"}, "on_error: expected 'return' or 'raise', got 'ignore'"),
        ([[1]], {"params": {"max_tokens": 1}}, "sampling_params: expected SamplingParams, got dict"),
    ],
)
def test_wrong_arguments_are_refused_by_the_call(prompts: Any, options: Any, complaint: str) -> None:
    with pytest.raises(InvalidInputError, match=complaint):
        start(ByHand(), prompts, **options)


# -------------------------------------------------------------------------------------- a real server
def test_a_real_server_that_fails_now_and_then() -> None:
    plan = FaultPlan().on("asample", faults.promise_failed("out of memory"), nth=3)
    with LocalServer(plan, model="tinker-sync/random") as server, server.service() as service:
        sampling = service.create_sampling_client(base_model="tinker-sync/random")
        prompts = (ModelInput.from_ints([1, n]) for n in range(20))
        items = list(sampling.map(prompts, PARAMS, max_in_flight=4, total=20, include_prompt_logprobs=True))
    assert [item.index for item in items] == list(range(20))
    assert sum(not item.ok for item in items) <= 1
    good = next(item for item in items if item.ok)
    assert good.result().prompt_logprobs is not None


def test_closing_the_client_ends_the_batch() -> None:
    with LocalServer(model="tinker-sync/random") as server:
        service = server.service()
        sampling = service.create_sampling_client(base_model="tinker-sync/random")
        items = sampling.map(([1, n] for n in range(10_000)), PARAMS, max_in_flight=4)
        next(items)
        service.close().result()
        with pytest.raises((ClientClosedError, ConfigurationError)):
            list(items)


KEY = "0123456789abcdef"


def response(value: float) -> SampleResponse:
    logprobs = np.array([value, np.nan], dtype=np.float32)
    return SampleResponse([SampledSequence("stop", "s", np.array([1, 2], np.int32), logprobs)])


def written(path: Path, *indexes: int) -> bytes:
    results = ResultsFile(path)
    for index in indexes:
        results.hold()
        results.add(index, KEY, response(index / 3), {})
    results.close()
    return path.read_bytes()


def test_numbers_come_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    written(path, 1, 0, 7)
    results = ResultsFile(path)
    assert len(results) == 3
    for index in (0, 1, 7):
        found = results.find(index, KEY)
        expected = response(index / 3).sequences[0].logprobs_np
        np.testing.assert_array_equal(found.sequences[0].logprobs_np, expected)
    assert results.find(2, KEY) is None
    results.close()


def test_torn_lines_are_removed_and_the_rest_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "out.jsonl"
    whole = written(path, 0, 1)
    second = whole.index(b"\n") + 1
    for cut in range(second + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            ResultsFile(path).close()
        assert path.read_bytes() == whole[:second]
        assert "cut short" in caplog.text


def test_zeros_that_a_power_cut_left_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = written(path, 0)
    path.write_bytes(whole + b"\0" * 100)
    ResultsFile(path).close()
    assert path.read_bytes() == whole


def test_a_whole_line_that_lacks_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = written(path, 0, 1)
    path.write_bytes(whole[:-1])
    results = ResultsFile(path)
    assert len(results) == 2
    results.close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"my notes\n", "line 1 of .*out.jsonl is not a result of map; give another file"),
        (b"my notes", "the last line of .*out.jsonl is not a result"),
        (b'{"index": "a"}\n', "line 1 of"),
        (b'{"name": "x", "indexes": [', "the last line of"),
    ],
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=complaint):
        ResultsFile(path)
    assert path.read_bytes() == content


def test_a_line_that_a_full_disk_cut_short_does_not_damage_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, room = tmp_path / "out.jsonl", [60]

    class FullDisk(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[: room.pop()] if room else data)

    monkeypatch.setattr(io, "FileIO", FullDisk)
    results = ResultsFile(path)
    for _ in range(2):
        results.hold()
    with pytest.raises(OSError, match="wrote 60 bytes"):
        results.add(0, KEY, response(0), {})
    results.add(1, KEY, response(1), {})
    results.close()
    again = ResultsFile(path)
    assert (again.find(0, KEY), again.find(1, KEY) is not None) == (None, True)
    again.close()


def test_two_batches_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    client = ByHand(at_once=True)
    first = start(client, [[1], [2]], save_to=path, max_in_flight=1)
    next(first)
    with pytest.raises(TinkerError, match="another map writes"):
        next(start(ByHand(), [[1]], save_to=path))
    first.close()
    assert len(list(start(client, [[1], [2]], save_to=path))) == 2


def test_what_was_sampled_comes_before_the_error_of_the_input() -> None:
    def prompts() -> Iterator[list[int]]:
        yield [1]
        raise OSError("the disk of the prompts is gone")

    items = start(ByHand(at_once=True), prompts())
    assert first_token(next(items)) == 1
    with pytest.raises(OSError, match="the disk of the prompts"):
        next(items)


@pytest.mark.parametrize("kind", ["device", "directory"])
def test_only_files_are_written(tmp_path: Path, kind: str) -> None:
    path = tmp_path if kind == "directory" else Path("/dev/full")
    with pytest.raises(InvalidInputError, match="is not a file"):
        list(start(ByHand(), [[1]], save_to=path))
