"""`get_tokenizer`: one load for many threads and names, other backends, clients, memory."""

from __future__ import annotations

import asyncio
import shutil
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


def test_failure_is_not_kept(tmp_path: Path, folders: Any) -> None:
    place = tmp_path / "later"
    with pytest.raises(TokenizerError):
        get_tokenizer(str(place))
    place.symlink_to(folders["unigram"])
    assert isinstance(get_tokenizer(str(place)), Tokenizer)


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


def test_the_last_32_stay_in_memory(tmp_path: Path, folders: Any) -> None:
    places = [str(shutil.copytree(folders["byte-level"], tmp_path / str(index))) for index in range(33)]
    first, second = get_tokenizer(places[0]), get_tokenizer(places[1])
    for place in places[2:32]:
        get_tokenizer(place)
    assert get_tokenizer(places[0]) is first  # used again, so the second one is the oldest
    get_tokenizer(places[32])
    assert get_tokenizer(places[0]) is first
    assert get_tokenizer(places[1]) is not second


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="backend: expected"):
        get_tokenizer("org/model", backend="tokenizer")  # type: ignore[call-overload]
    with pytest.raises(TokenizerError, match="names neither"):
        get_tokenizer("", None)
