"""The files of a tokenizer: rules from names to sources, directories, the hub's cache, downloads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.servers import AnsweringServer, Seen, answer

import tinker_sync
from tinker_sync import TokenizerError
from tinker_sync.data import hub
from tinker_sync.data.hub import (
    CONFIG_FILE,
    LLAMA_3,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    TokenizerSource,
    resolve,
)

COMMIT = "c" * 40
SOURCE = TokenizerSource("org/model")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def put(
    cache: Path, *names: str, absent: tuple[str, ...] = (), commit: str = COMMIT, ref: str = "main"
) -> Path:
    """Put empty files into the cache, in the layout of the hub's library. Return the snapshot's directory.

    The cache records the files in `absent` as missing at the hub.
    """
    root = cache / "models--org--model"
    for folder, files in ((root / "snapshots" / commit, names), (root / ".no_exist" / commit, absent)):
        folder.mkdir(parents=True, exist_ok=True)
        for name in files:
            (folder / name).touch()
    (root / "refs").mkdir(exist_ok=True)
    (root / "refs" / ref).write_text(commit)
    return root / "snapshots" / commit


class HubErrors:
    class EntryNotFoundError(Exception):
        pass

    class LocalEntryNotFoundError(EntryNotFoundError):
        pass

    class RepositoryNotFoundError(Exception):
        pass

    class RevisionNotFoundError(Exception):
        pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, cache: Path) -> list[tuple[str, str | None]]:
    """Install a double of the hub's library. Return its log: a pair of file and revision for each request.

    The log's `answer` handles each request; by default it puts the file into the cache.
    """

    class Log(list[tuple[str, str | None]]):
        answer: Callable[[str], Any] = staticmethod(lambda name: put(cache, name))

    log = Log()

    def hf_hub_download(repo_id: str, filename: str, *, revision: str | None) -> None:
        assert repo_id == "org/model"
        log.append((filename, revision))
        log.answer(filename)

    library: Any = types.ModuleType("huggingface_hub")
    library.hf_hub_download = hf_hub_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", HubErrors)  # type: ignore[arg-type]
    return log


# ------------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HOME": "/d"}, "/d/.cache/huggingface/hub"),
        ({"HF_HOME": "~/e", "HOME": "/d"}, "/d/e/hub"),
        ({"HF_HOME": "$HOME/e", "HOME": "/d"}, "/d/e/hub"),
        ({"HF_HOME": "", "HOME": "/d"}, "/d/.cache/huggingface/hub"),
    ],
)
def test_cache_directory_follows_the_hubs_variables(
    variables: dict[str, str], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub.cache_directory() == Path(place)


@pytest.mark.parametrize("revision", [COMMIT, "v1"])
def test_revision_is_found_by_commit_and_name(cache: Path, revision: str) -> None:
    put(cache, *hub.WANTED, commit="d" * 40)
    snapshot = put(cache, *hub.WANTED, ref="v1")
    assert hub.find(TokenizerSource("org/model", revision)) == snapshot


def test_missing_files_are_fetched(cache: Path, asked: list[Any]) -> None:
    put(cache, TOKENIZER_FILE)
    assert {path.name for path in hub.find(SOURCE).iterdir()} == {*hub.WANTED}
    assert asked == [(CONFIG_FILE, None), (TEMPLATE_FILE, None)]


def test_files_absent_upstream_are_optional(cache: Path, asked: Any) -> None:
    def answer(name: str) -> None:
        if name != TOKENIZER_FILE:
            put(cache, absent=(name,))
            raise HubErrors.EntryNotFoundError(name)
        put(cache, name)

    asked.answer = answer
    assert (hub.find(SOURCE) / TOKENIZER_FILE).is_file()
    assert [name for name, _ in asked] == list(hub.WANTED)
    hub.find(SOURCE)
    assert len(asked) == len(hub.WANTED)


# ------------------------------------------------------------------------------------------- without network


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_uses_the_cache_or_explains(
    cache: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "yes")
    with pytest.raises(TokenizerError) as caught:
        hub.find(TokenizerSource("org/model", COMMIT))
    text = str(caught.value)
    for words in (
        str(cache),
        f"hf download org/model {TOKENIZER_FILE} {CONFIG_FILE} {TEMPLATE_FILE} --revision {COMMIT}",
        "HF_HUB_OFFLINE",
        "into a directory",
    ):
        assert words in text
    assert caught.value.tokenizer_id == "org/model"
    snapshot = put(cache, TOKENIZER_FILE)
    assert hub.find(SOURCE) == snapshot
    assert asked == []


def test_unreachable_hub_uses_the_cache_with_a_warning(
    cache: Path, asked: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(_: str) -> None:
        raise HubErrors.LocalEntryNotFoundError("no route to host\nlong story")

    asked.answer = answer
    with pytest.raises(
        TokenizerError, match=r"could not be fetched \(no route to host\)\. On a machine with"
    ):
        hub.find(SOURCE)
    assert len(asked) == 1  # the other files are not requested
    snapshot = put(cache, TOKENIZER_FILE, CONFIG_FILE)
    assert hub.find(SOURCE) == snapshot
    assert "no route to host" in caplog.text
    assert TEMPLATE_FILE in caplog.text


@pytest.mark.parametrize(
    ("error", "source", "words"),
    [
        (HubErrors.EntryNotFoundError("404"), SOURCE, "it has no tokenizer.json. get_tokenizer(backend="),
        (HubErrors.RepositoryNotFoundError("401 Unauthorized"), SOURCE, "401 Unauthorized"),
        (HubErrors.RevisionNotFoundError("no such revision"), SOURCE, "no such revision"),
        (
            HubErrors.EntryNotFoundError("404"),
            TokenizerSource("org/model", None, True),
            "Code of the repository",
        ),
    ],
)
def test_unusable_repository_is_explained(
    asked: Any, error: Exception, source: TokenizerSource, words: str
) -> None:
    def answer(_: str) -> None:
        raise error

    asked.answer = answer
    with pytest.raises(TokenizerError, match="the repository 'org/model' cannot be used") as caught:
        hub.find(source)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["../../etc", "a/b/c", "a b/c", "", "org/../x", "https://h/x"])
def test_invalid_ids_are_refused(name: str, asked: list[Any]) -> None:
    with pytest.raises(TokenizerError):
        hub.find(TokenizerSource(name))
    assert asked == []


def test_incomplete_directory_is_explained(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"does not exist; put the model's tokenizer\.json"):
        hub.find(TokenizerSource(str(tmp_path / "no")))
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
        hub.find(TokenizerSource(str(tmp_path)))
    (tmp_path / TOKENIZER_FILE).touch()
    assert hub.find(TokenizerSource(str(tmp_path))) == tmp_path


# ------------------------------------------------------------------------------------------- the real library


def test_real_library_fetches_once(folders: Any, tmp_path: Path) -> None:
    folder = folders["word-piece"]
    files = {name: (folder / name).read_bytes() for name in (TOKENIZER_FILE, CONFIG_FILE)}

    def respond(seen: Seen) -> bytes:
        """Answer as a hub with one repository, which has `files` at one commit."""
        name = seen.target.rpartition("/")[2]
        if name not in files:
            absent = {"X-Repo-Commit": COMMIT, "X-Error-Code": "EntryNotFound"}
            return answer(b"", status=404, headers=absent)
        body = b"" if seen.method == "HEAD" else files[name]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{name}-1"'}
        return answer(body, headers=headers, length=len(files[name]))

    code = (
        "import sys, tinker_sync as t\n"
        "made = t.get_tokenizer('org/model')\n"
        "print(made.encode('hello world'), made.sep_token, made.name_or_path)\n"
        "print('huggingface_hub' in sys.modules)"
    )
    with AnsweringServer(respond) as upstream:
        variables = {
            "HF_ENDPOINT": upstream.url,
            "HF_HOME": str(tmp_path),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "PYTHONPATH": str(Path(tinker_sync.__file__).parents[1]),
        }
        command = [sys.executable, "-c", code]
        first, second = (
            subprocess.run(
                command, env=os.environ | variables, capture_output=True, text=True, timeout=120, check=False
            )
            for _ in range(2)
        )
    ours = tinker_sync.Tokenizer.from_directory(folder)
    printed = f"{ours.encode('hello world')} [SEP] org/model\n"
    assert (first.stdout, first.stderr) == (f"{printed}True\n", "")
    assert (second.stdout, second.stderr) == (f"{printed}False\n", "")
    asked = [f"{seen.method} {seen.target.rpartition('/')[2]}" for seen in upstream.seen]
    assert f"HEAD {TEMPLATE_FILE}" in asked
    assert [line for line in asked if line in {f"GET {name}" for name in hub.WANTED}] == [
        f"GET {name}" for name in files
    ]
    shutil.rmtree(tmp_path)


# ------------------------------------------------------------------------------------------- names

KIMI_25 = TokenizerSource("moonshotai/Kimi-K2.5", "4d01dfe0332d63057c186e0b262165819efb6611", True)


@pytest.mark.parametrize(
    ("model_name", "tokenizer_id", "source"),
    [
        ("org/model", None, TokenizerSource("org/model")),
        ("org/model:peft:131072", None, TokenizerSource("org/model")),
        ("org/model/variant", None, TokenizerSource("org/model")),
        ("org/model/variant:fast", None, TokenizerSource("org/model")),
        ("a/b/c/d", None, TokenizerSource("a/b/c/d")),
        ("gpt2", None, TokenizerSource("gpt2")),
        ("meta-llama/Llama-3.1-8B", None, TokenizerSource(LLAMA_3)),
        ("meta-llama/Llama-3.3-70B-Instruct:x", None, TokenizerSource(LLAMA_3)),
        ("meta-llama/Llama-2-7b", None, TokenizerSource("meta-llama/Llama-2-7b")),
        ("org/model", "org/tok", TokenizerSource("org/tok")),
        ("org/model", "org/tok:131072:peft", TokenizerSource("org/tok")),
        ("org/model", "", TokenizerSource("org/model")),
        # The rules for families apply to model names only, not to the server's tokenizer id.
        ("any", "meta-llama/Llama-3.1-8B", TokenizerSource("meta-llama/Llama-3.1-8B")),
        ("any", "org/model/variant", TokenizerSource("org/model/variant")),
        ("moonshotai/Kimi-K2.5", None, KIMI_25),
        ("moonshotai/Kimi-K2.5-Text-Only", None, KIMI_25),
        ("any", "moonshotai/Kimi-K2.5:x", KIMI_25),
        (
            "moonshotai/Kimi-K2-Thinking",
            None,
            TokenizerSource("moonshotai/Kimi-K2-Thinking", "612681931a8c906ddb349f8ad0f582cb552189cd", True),
        ),
        (
            "moonshotai/Kimi-K2.6",
            None,
            TokenizerSource("moonshotai/Kimi-K2.6", "b5aabbfb20227ed42becbf5541dbffd213942c58", True),
        ),
        (
            "moonshotai/Kimi-K3",
            None,
            TokenizerSource("moonshotai/Kimi-K3", "f831ab66814297da540d832a5235f8e904f29d06", True),
        ),
    ],
)
def test_rules(model_name: str, tokenizer_id: str | None, source: TokenizerSource) -> None:
    assert resolve(model_name, tokenizer_id) == source


def test_directories_resolve_to_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a:b" / "model"
    place.mkdir(parents=True)
    assert resolve(str(place)) == TokenizerSource(str(place))
    assert resolve("any/model", str(place)) == TokenizerSource(str(place))
    (tmp_path / "alias").symlink_to(place)
    assert resolve(str(tmp_path / "alias")) == TokenizerSource(str(place))
    monkeypatch.chdir(tmp_path)
    assert resolve(os.path.join("a:b", "model")) == TokenizerSource(str(place))
    assert resolve("./missing") == TokenizerSource(str(tmp_path / "missing"))
    assert TokenizerSource("./missing").is_directory
