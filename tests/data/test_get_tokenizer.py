"""`get_tokenizer`: one load for many threads and names, other backends, clients, memory."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.tinker_stub import Answer, Stub, StubServer

import tinker_sync
from tinker_sync import InvalidInputError, Tokenizer, TokenizerError, get_tokenizer
from tinker_sync.data import tokenizer as loading

THREADS = 32


class Loads:
    """A record of the loaded directories. A load waits until `threads` threads have asked for a tokenizer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
        self.directories: list[str] = []
        asked = threading.Semaphore(0)
        resolve, from_directory = loading.resolve, Tokenizer.from_directory

        def resolve_together(*names: Any) -> Any:
            asked.release()
            return resolve(*names)

        def load(directory: Any, **options: Any) -> Tokenizer:
            self.directories.append(str(directory))
            assert all(asked.acquire(timeout=120) for _ in range(threads))
            return from_directory(directory, **options)

        monkeypatch.setattr(loading, "resolve", resolve_together)
        monkeypatch.setattr(Tokenizer, "from_directory", load)


def ask_at_once(*asks: Callable[[], Any]) -> list[Any]:
    gate = threading.Barrier(len(asks))

    def run(ask: Callable[[], Any]) -> Any:
        gate.wait(120)
        return ask()

    with ThreadPoolExecutor(len(asks)) as pool:
        return [future.result(120) for future in [pool.submit(run, ask) for ask in asks]]


def test_32_threads_load_a_tokenizer_once(
    folders: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = str(shutil.copytree(folders["byte-level"], tmp_path / "model"))
    loads = Loads(monkeypatch, THREADS)
    made = ask_at_once(*[lambda: get_tokenizer(place)] * THREADS)
    assert loads.directories == [place]
    assert len(set(map(id, made))) == 1


def test_names_of_one_tokenizer_load_it_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folders: Any
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--model" / "snapshots" / "main"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(folders["byte-level"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    loads = Loads(monkeypatch, THREADS)
    names = [
        lambda: get_tokenizer("org/model"),
        lambda: get_tokenizer("org/model:8"),
        lambda: get_tokenizer("org/model/variant"),
        lambda: get_tokenizer("else/thing", "org/model:131072"),
    ]
    made = ask_at_once(*names * (THREADS // len(names)))
    assert loads.directories == [str(snapshot)]
    assert len(set(map(id, made))) == 1


def test_failure_is_not_kept(tmp_path: Path, folders: Any) -> None:
    place = tmp_path / "later"
    with pytest.raises(TokenizerError):
        get_tokenizer(str(place))
    place.symlink_to(folders["unigram"])
    assert isinstance(get_tokenizer(str(place)), Tokenizer)


def test_the_last_32_stay_in_memory(tmp_path: Path, folders: Any) -> None:
    places = [str(shutil.copytree(folders["byte-level"], tmp_path / str(index))) for index in range(33)]
    first, second = get_tokenizer(places[0]), get_tokenizer(places[1])
    for place in places[2:32]:
        get_tokenizer(place)
    assert get_tokenizer(places[0]) is first  # used again, so the second one is the oldest
    get_tokenizer(places[32])
    assert get_tokenizer(places[0]) is first
    assert get_tokenizer(places[1]) is not second


def test_a_thread_that_waited_takes_over_from_an_interrupted_load(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folders: Any
) -> None:
    place = str(shutil.copytree(folders["byte-level"], tmp_path / "model"))
    loading_now, go_on = threading.Event(), threading.Event()
    from_directory, calls = Tokenizer.from_directory, []

    def load(directory: Any, **options: Any) -> Tokenizer:
        calls.append(threading.get_ident())
        if len(calls) == 1:
            loading_now.set()
            assert go_on.wait(120)
            raise KeyboardInterrupt
        return from_directory(directory, **options)

    monkeypatch.setattr(Tokenizer, "from_directory", load)
    with ThreadPoolExecutor(2) as pool:
        interrupted = pool.submit(get_tokenizer, place)
        assert loading_now.wait(120)
        waiting = pool.submit(get_tokenizer, place)
        go_on.set()
        assert isinstance(waiting.result(120), Tokenizer)
        with pytest.raises(KeyboardInterrupt):
            interrupted.result(120)
    assert len(set(calls)) == len(calls) == 2


# ------------------------------------------------------------------------------------------- other backends


def test_transformers_backend(monkeypatch: pytest.MonkeyPatch, folders: Any) -> None:
    calls = []

    def from_pretrained(name: str, **options: Any) -> object:
        calls.append((name, options))
        if name == "no/such":
            raise OSError("no such repository")
        return object()

    library: Any = types.ModuleType("transformers")
    library.AutoTokenizer = types.SimpleNamespace(from_pretrained=from_pretrained)
    monkeypatch.setitem(sys.modules, "transformers", library)
    place = str(folders["unigram"])
    foreign = get_tokenizer(place, backend="transformers")
    assert get_tokenizer(place, backend="transformers") is foreign
    assert get_tokenizer(place) is not foreign
    get_tokenizer("moonshotai/Kimi-K3", backend="transformers")
    revision = "f831ab66814297da540d832a5235f8e904f29d06"
    assert calls == [
        (place, {"use_fast": True, "trust_remote_code": False}),
        ("moonshotai/Kimi-K3", {"use_fast": True, "trust_remote_code": True, "revision": revision}),
    ]
    with pytest.raises(TokenizerError, match="transformers cannot load 'no/such': no such repository"):
        get_tokenizer("no/such", backend="transformers")


def test_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerError, match="pip install transformers"):
        get_tokenizer("org/model", backend="transformers")


def test_vendor_tokenizers_need_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokenizerError, match="tml_tokenizers, which is not installed; tml-renderers"):
        get_tokenizer("TML/base")
    vendor: Any = types.ModuleType("tml_tokenizers.tinker_tokenizers")
    vendor.get_tinker_tokenizer = lambda name: None if name == "TML/open" else f"made for {name}"
    monkeypatch.setitem(sys.modules, "tml_tokenizers", types.ModuleType("tml_tokenizers"))
    monkeypatch.setitem(sys.modules, "tml_tokenizers.tinker_tokenizers", vendor)
    assert get_tokenizer("any", "TML/base") == "made for TML/base"  # type: ignore[comparison-overlap]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TokenizerError, match="'TML/open' is not in"):  # the vendor's package lacks it
        get_tokenizer("TML/open")


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="backend: expected"):
        get_tokenizer("org/model", backend="tokenizer")  # type: ignore[call-overload]
    with pytest.raises(TokenizerError, match="names neither"):
        get_tokenizer("", None)


# ------------------------------------------------------------------------------------------- clients


@pytest.fixture
def stub() -> Iterator[Stub]:
    with StubServer() as stub:
        yield stub  # type: ignore[misc]


@pytest.fixture
def service(stub: Stub) -> Iterator[tinker_sync.ServiceClient]:
    with tinker_sync.ServiceClient(base_url=stub.url, api_key="tml-text") as service:  # type: ignore[attr-defined]
        yield service


def info(model_name: str | None, tokenizer_id: str | None) -> Answer:
    data = {"arch": "a", "model_name": model_name, "tokenizer_id": tokenizer_id}
    return Answer(200, {"type": "get_info", "model_data": data, "model_id": "session-0:train:0"})


def test_training_client_loads_once(stub: Stub, service: tinker_sync.ServiceClient, folders: Any) -> None:
    place = str(folders["byte-level"])
    training = service.create_lora_training_client("stub/model", rank=8).result()
    stub.script("/get_info", info("org/model", place), info(place, None), info(place, None))
    made = training.get_tokenizer()
    assert isinstance(made, Tokenizer)
    assert made.name_or_path == place
    assert training.get_tokenizer() is made
    assert asyncio.run(training.get_tokenizer_async()) is made
    assert len(stub.asked("/get_info")) == 3
    stub.script("/get_info", info(None, None))
    with pytest.raises(TokenizerError, match="names neither"):
        training.get_tokenizer()


def test_sampling_client_uses_base_model_or_tokenizer_id(
    stub: Stub, service: tinker_sync.ServiceClient, folders: Any
) -> None:
    place = str(folders["byte-level"])
    sampling = service.create_sampling_client(base_model="stub/model").result()
    sampler = f"/samplers/{sampling.sampling_session_id}"
    plain = {"sampler_id": "s", "base_model": place}
    stub.script(
        sampler, Answer(200, plain), Answer(200, {**plain, "base_model": "x/y", "tokenizer_id": place})
    )
    made = sampling.get_tokenizer()
    assert isinstance(made, Tokenizer)
    assert asyncio.run(sampling.get_tokenizer_async()) is made


# ------------------------------------------------------------------------------------------- memory

RESIDENT = """
import sys
from tinker_sync.data import tokenizer as loading
def resident():
    with open("/proc/self/status") as status:
        return int(next(line.split()[1] for line in status if line.startswith("VmRSS:")))
if sys.argv[2] == "kept":
    loading.trim_malloc = lambda: False
before = resident()
tokenizer = loading.get_tokenizer(sys.argv[1])
print(resident() - before, len(tokenizer))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc gives memory back")
def test_large_vocabulary_leaves_little_memory(tmp_path: Path) -> None:
    letters = [chr(point) for point in range(0x4E00, 0x4E00 + 245)]
    pairs = [(one, other) for one in letters for other in letters][: 60_000 - len(letters)]
    tokens = [*letters, *map("".join, pairs)]
    model = {
        "type": "BPE",
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": [" ".join(pair) for pair in pairs],
    }
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "normalizer": None, "model": model})
    )
    grown = {}
    for how in ("kept", "trimmed"):
        done = subprocess.run(
            [sys.executable, "-c", RESIDENT, str(tmp_path), how],
            env=os.environ | {"PYTHONPATH": str(Path(tinker_sync.__file__).parents[1])},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        grown[how], size = map(int, done.stdout.split())
        assert size == 60_000
    assert grown["trimmed"] < 0.9 * grown["kept"]


def test_other_systems_trim_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert loading.trim_malloc() is False
