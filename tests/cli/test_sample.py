"""`sample`: prompts from an argument, a file or a pipe, and samples printed as they arrive."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from support.cli_runs import Run
from support.cli_world import World
from support.tinker_stub import Answer, Asked

MODEL = ("--model", "stub/model")
SIX = {"prompt": 0, "sample": 0, "tokens": [6, 7], "logprobs": [-0.06, -0.07], "stop_reason": "length"}


def test_tokens_in_tokens_out(run: Run, world: World) -> None:
    line = ("sample", "1 2 3", "--tokens", *MODEL, "--max-tokens", "2")
    done = run(*line)
    assert (done.code, done.out, done.err) == (0, "6 7\n", "")
    [item] = run(*line, "-f", "jsonl").lines
    item["logprobs"] = [round(value, 6) for value in item["logprobs"]]
    assert item == SIX
    assert [each["tokens"] for each in run(*line, "-f", "json").json["samples"]] == [[6, 7]]


@pytest.mark.parametrize("prompt", ["text", "1 2 3"])
def test_a_wrong_model_is_named_and_not_the_lack_of_a_tokenizer(run: Run, world: World, prompt: str) -> None:
    world.script("/create_sampling_session", Answer(400, {"detail": "base model 'wrong' is not offered"}))
    done = run("sample", prompt, "--model", "wrong")
    assert (done.code, done.out) == (1, "")
    assert "base model 'wrong' is not offered" in done.err
    assert "tokenizer" not in done.err
    assert "client created at" not in done.err


def test_options_reach_the_server(run: Run, world: World) -> None:
    options = ("--temperature", "0.5", "--top-p", "0.9", "--top-k", "7", "--seed", "40", "--stop", "9")
    path = "tinker://run-1/sampler_weights/a"
    done = run("sample", "1,2", "--tokens", "--path", path, "-n", "2", "--max-tokens", "3", *options)
    assert done.code == 0
    assert world.asked("/create_sampling_session")[0].json()["model_path"] == path
    asked = [each.json() for each in world.asked("/asample")]
    assert [each["num_samples"] for each in asked] == [1, 1]
    assert sorted(each["sampling_params"]["seed"] for each in asked) == [40, 41]
    params = asked[0]["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"], params["stop"]) == (0.5, 0.9, 7, [9])


def test_prompts_from_files_and_pipes(run: Run, world: World, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("1 2\n\n3 4\n")
    usual = ("--tokens", *MODEL, "--max-tokens", "1", "-f", "json")
    whole = run("sample", "--file", str(file), *usual).json["samples"]
    assert [each["tokens"] for each in whole] == [[10]]
    by_line = run("sample", "--file", str(file), "--lines", "-n", "2", *usual).json["samples"]
    assert [(each["prompt"], each["sample"], each["tokens"]) for each in by_line] == [
        (0, 0, [3]),
        (0, 1, [3]),
        (1, 0, [7]),
        (1, 1, [7]),
    ]
    for line in (("--file", "-"), ("-",), ()):
        assert run("sample", *line, *usual, stdin="5 5\n").json["samples"][0]["tokens"] == [10]


def test_samples_are_printed_as_they_arrive(run: Run, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sample is printed while the server still holds the second one back."""
    from tinker_sync.cli.output import Sink

    printed, seen = threading.Event(), []
    real = Sink.raw

    def raw(self: Sink, text: str) -> None:
        seen.append(text)
        printed.set()
        real(self, text)

    monkeypatch.setattr(Sink, "raw", raw)
    slow: list[str] = []

    def hold(asked: Asked) -> Answer | None:
        if not slow:
            slow.append(asked.json()["request_id"])
        if asked.json()["request_id"] == slow[0]:
            return Answer(gate=printed, usual=True)
        return None

    world.script("/retrieve_future", hold, hold)
    done = run("sample", "1 2", "--tokens", *MODEL, "-n", "2", "--max-tokens", "1")
    assert done.code == 0
    assert seen == ["3", "3"]
    assert done.out.count("--- prompt 1, sample ") == 2
    assert "1 token, length" in done.out


def test_a_failed_sample(run: Run, world: World) -> None:
    world.script("/retrieve_future", Answer(body={"error": "no room", "category": "user"}))
    done = run("sample", "1 2", "--tokens", *MODEL, "-n", "2", "--max-tokens", "1", "-f", "jsonl")
    assert done.code == 3
    assert len(done.lines) == 1
    assert "no room" in done.err
    assert "1 sample of 2 failed" in done.err


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (("1",), 2, "give either --model NAME or --path PATH"),
        (("1", *MODEL, "--path", "tinker://r/sampler_weights/a"), 2, "give either --model"),
        (("1", "--model", "tinker://r/sampler_weights/a"), 2, "--path tinker://r/sampler_weights/a"),
        (("1", "--path", "org/model"), 2, "--model org/model"),
        (("1", *MODEL, "--file", "x"), 2, "give either PROMPT or --file"),
        (("1", *MODEL, "-n", "0"), 2, "x>=1"),
        (("a b", *MODEL, "--tokens"), 1, "there is no tokenizer"),
        (("", *MODEL, "--tokens"), 1, "the prompt is empty\nGive a text as PROMPT, with --file FILE"),
        (("--lines", *MODEL, "--tokens"), 1, "every line is empty"),
        (("--file", "/no/such/file", *MODEL, "--tokens"), 1, "No such file or directory: /no/such/file"),
        (("1", *MODEL, "--tokens", "--stop", "end"), 1, "--stop takes token ids"),
    ],
)
def test_conflicts_are_refused(run: Run, world: World, line: tuple[str, ...], code: int, words: str) -> None:
    done = run("sample", *line)
    assert (done.code, done.out) == (code, "")
    assert words in done.err
    assert world.asked("/asample") == []


def test_text_with_the_tokenizer_of_the_model(run: Run, world: World, tmp_path: Path) -> None:
    """The command encodes prompts and decodes samples with the tokenizer of the model that the server names.

    The name is that of a directory with a tokenizer.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[UNK]": 0, "one": 1, "two": 2, "three": 3, "four": 4}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    about = {"sampler_id": "s", "base_model": str(tmp_path)}
    sampler = "/samplers/session-0:sample:0"
    world.script(sampler, Answer(body=about))
    done = run("sample", "one two", *MODEL, "--max-tokens", "2")
    assert (done.code, done.out) == (0, "three four\n")
    world.script(sampler.replace("session-0", "session-1"), Answer(body=about))
    [item] = run("sample", "one two", *MODEL, "--max-tokens", "2", "-f", "jsonl").lines
    assert (item["text"], item["tokens"]) == ("three four", [3, 4])
    assert json.dumps(world.asked("/asample")[0].json()["prompt"]["chunks"][0]["tokens"]) == "[1, 2]"
    # A sample of special tokens only is an empty text, not a list of ids.
    world.script(sampler.replace("session-0", "session-2"), Answer(body=about))
    assert run("sample", "four four", *MODEL, "--max-tokens", "1").out == "\n"
    world.script(sampler.replace("session-0", "session-3"), Answer(body={**about, "base_model": "/no/where"}))
    without = run("sample", "1 2", *MODEL, "--max-tokens", "2")
    assert (without.code, without.out) == (0, "3 4\n")
    assert "Prompts and samples are token ids." in without.err


def test_a_prompt_outside_utf8_is_refused(run: Run, world: World, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"ab\xff")
    for line, typed in ((("--file", str(tmp_path / "prompt")), ""), ((), "ab\udcff")):
        done = run("sample", *line, *MODEL, stdin=typed)
        assert (done.code, done.out) == (1, "")
        assert done.err == (
            "Error: the prompt is not text in UTF-8 from position 2 on\n"
            "Write it in UTF-8, or give token ids with --tokens.\n"
        )
        assert world.asked("/create_sampling_session") == []
