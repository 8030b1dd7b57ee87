"""One load for each tokenizer: many threads, several names, failures, other backends, clients."""

from __future__ import annotations

import asyncio
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
from tinker_sync.runtime.once import Once
from tinker_sync.text import loading
from tinker_sync.text.cache import LoadedOnce

THREADS = 32


@pytest.fixture(autouse=True)
def nothing_loaded() -> Iterator[None]:
    loading._loaded.clear()
    yield
    loading._loaded.clear()


class Loads:
    """Counts loads; the first goes on when so many other threads wait for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
        self.sources: list[str] = []
        waiting = threading.Semaphore(0)
        others = [threads - 1]
        real_await, real_load = Once._await, loading._load

        def wait(*arguments: Any) -> None:
            waiting.release()
            real_await(*arguments)

        def load(source: Any) -> Any:
            self.sources.append(source.id)
            for _ in range(others.pop() if others else 0):
                assert waiting.acquire(timeout=30)
            return real_load(source)

        monkeypatch.setattr(Once, "_await", staticmethod(wait))
        monkeypatch.setattr(loading, "_load", load)


def ask_at_once(*asks: Callable[[], Any]) -> list[Any]:
    gate = threading.Barrier(len(asks))

    def run(ask: Callable[[], Any]) -> Any:
        gate.wait(30)
        try:
            return ask()
        except TokenizerError as error:
            return error

    with ThreadPoolExecutor(len(asks)) as pool:
        return [future.result(60) for future in [pool.submit(run, ask) for ask in asks]]


def test_32_threads_asking_for_a_new_tokenizer_load_it_once(
    folders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(folders["byte-level"])
    loads = Loads(monkeypatch, THREADS)
    made = ask_at_once(*[lambda: get_tokenizer(place)] * THREADS)
    assert loads.sources == [place]
    assert len(set(map(id, made))) == 1
    assert isinstance(made[0], Tokenizer)


def test_names_that_resolve_to_one_id_load_it_once(
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
    assert loads.sources == ["org/model"]
    assert len(set(map(id, made))) == 1


def test_a_failure_is_told_to_all_who_waited_and_then_forgotten(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folders: Any
) -> None:
    place = tmp_path / "later"
    loads = Loads(monkeypatch, THREADS)
    made = ask_at_once(*[lambda: get_tokenizer(str(place))] * THREADS)
    assert loads.sources == [str(place)]
    assert [str(error) for error in made] == [str(made[0])] * THREADS
    assert isinstance(made[0], TokenizerError)
    place.symlink_to(folders["unigram"])
    assert isinstance(get_tokenizer(str(place)), Tokenizer)


def test_the_last_ones_are_kept() -> None:
    cache: LoadedOnce[str] = LoadedOnce(2)
    made = []

    def load(key: str) -> str:
        made.append(key)
        return key

    for key in "abacab":
        assert cache.get(key, lambda key=key: load(key)) == key  # type: ignore[misc]
    assert made == ["a", "b", "c", "b"]


def test_a_forked_child_can_load(folders: Any) -> None:
    cache: LoadedOnce[int] = LoadedOnce(2)
    with cache._lock:  # as a thread that only the parent has may leave it
        cache.renew_after_fork()
    assert cache.get("a", lambda: 1) == 1


def test_older_repositories_are_asked_for_their_older_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folders: Any
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    asked = []

    def hf_hub_download(repo_id: str, name: str, *, revision: str | None) -> None:
        snapshot = tmp_path / f"models--{repo_id.replace('/', '--')}" / "snapshots" / "main"
        snapshot.mkdir(parents=True, exist_ok=True)
        source = folders["unigram" if repo_id == "org/older" else "byte-level"] / name
        (snapshot / name).write_bytes(source.read_bytes() if source.exists() else b"")
        asked.append(name)

    class Errors:
        class EntryNotFoundError(Exception):
            pass

        LocalEntryNotFoundError = RepositoryNotFoundError = RevisionNotFoundError = EntryNotFoundError

    library: Any = types.ModuleType("huggingface_hub")
    library.hf_hub_download = hf_hub_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", Errors)  # type: ignore[arg-type]
    usual = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    older = get_tokenizer("org/older")
    assert asked == [*usual, "special_tokens_map.json", "added_tokens.json"]
    assert older.extra_special_tokens == ["<extra_0>"]  # which only the older file has
    asked.clear()
    get_tokenizer("org/newer")
    assert asked == usual


# ------------------------------------------------------------------------------------------- other backends


def test_transformers_makes_its_own_class(monkeypatch: pytest.MonkeyPatch, folders: Any) -> None:
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
    theirs = get_tokenizer(place, backend="transformers")
    assert get_tokenizer(place, backend="transformers") is theirs
    assert get_tokenizer(place) is not theirs
    get_tokenizer("moonshotai/Kimi-K3", backend="transformers")
    revision = "f831ab66814297da540d832a5235f8e904f29d06"
    assert calls == [
        (place, {"use_fast": True, "trust_remote_code": False}),
        ("moonshotai/Kimi-K3", {"use_fast": True, "trust_remote_code": True, "revision": revision}),
    ]
    with pytest.raises(TokenizerError, match="transformers cannot load 'no/such': no such repository"):
        get_tokenizer("no/such", backend="transformers")


def test_without_transformers_its_backend_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerError, match="pip install transformers"):
        get_tokenizer("org/model", backend="transformers")


def test_the_vendors_own_models_need_the_vendors_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokenizerError, match="tml_tokenizers, which is not installed; tml-renderers"):
        get_tokenizer("TML/base")
    theirs: Any = types.ModuleType("tml_tokenizers.tinker_tokenizers")
    theirs.get_tinker_tokenizer = lambda name: None if name == "TML/open" else f"made for {name}"
    monkeypatch.setitem(sys.modules, "tml_tokenizers", types.ModuleType("tml_tokenizers"))
    monkeypatch.setitem(sys.modules, "tml_tokenizers.tinker_tokenizers", theirs)
    assert get_tokenizer("any", "TML/base") == "made for TML/base"  # type: ignore[comparison-overlap]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(TokenizerError, match="'TML/open' is not in"):  # left to the hub
        get_tokenizer("TML/open")


def test_what_cannot_be_asked_for() -> None:
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
    return Answer(200, {"type": "get_info", "model_data": data, "model_id": "m"})


def test_a_training_client_asks_the_server_each_time_and_loads_once(
    stub: Stub, service: tinker_sync.ServiceClient, folders: Any
) -> None:
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


def test_a_sampling_client_goes_by_the_base_models_name_or_what_the_server_says(
    stub: Stub, service: tinker_sync.ServiceClient, folders: Any
) -> None:
    place = str(folders["byte-level"])
    sampling = service.create_sampling_client(base_model="stub/model").result()
    sampler = f"/samplers/{sampling._sampling_session_id}"
    plain = {"sampler_id": "s", "base_model": place}
    stub.script(
        sampler, Answer(200, plain), Answer(200, {**plain, "base_model": "x/y", "tokenizer_id": place})
    )
    made = sampling.get_tokenizer()
    assert isinstance(made, Tokenizer)
    assert asyncio.run(sampling.get_tokenizer_async()) is made
