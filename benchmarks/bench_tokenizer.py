"""Measure the first `get_tokenizer()` of a process, beside the reference client in the same run.

The script makes byte-level tokenizers of three sizes in a cache like that of the hub. Fresh processes of both
clients then load each of them in turn, without a network. Two figures are measured, after the import of the
client and as if the server had already named the model:

  time     until a tokenizer is loaded and has encoded a text
  memory   the growth of the resident set; "of its own" leaves out the pages of files, which processes share

Other processes load the same file with the library `tokenizers` alone, which both clients use. "Beyond the
library" is the difference between a client and the library.

    python benchmarks/bench_tokenizer.py --reference-python /path/to/venv/with/reference/bin/python

Floors: a tenth of the reference's time and of its growth of memory. The exit code is 1 if one is missed. Both
clients load the vocabulary with the same library, so a larger vocabulary leaves less to save. The lines
without a floor therefore show the part that a client adds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from _processes import Figures, medians, resident_mb, run_in_fresh_process, use_two_cores


class Floor(NamedTuple):
    """A line of the table: a figure and its floor, which is a share or an absolute bound, or is missing.

    With `share`, ours may be at most this share of the reference's.
    """

    figure: str
    label: str
    unit: str
    share: float | None = None
    most: float | None = None
    """The largest figure, in place of a share."""
    least: float | None = None
    """The smallest multiple of the reference's figure, if more is better."""

    def holds(self, ours: float, theirs: float) -> bool | None:
        """Return True if our figure keeps its floor, False if it misses it, None if the line has no floor."""
        if self.share is not None:
            return ours <= self.share * theirs
        if self.most is not None:
            return ours <= self.most
        return ours >= self.least * theirs if self.least is not None else None

    @property
    def words(self) -> str:
        if self.share is not None:
            return f"<= {self.share:.2f}x"
        if self.most is not None:
            return f"<= {self.most:g}"
        return f">= {self.least:.1f}x" if self.least is not None else "-"


def print_head() -> None:
    print(f"{'figure':58}{'ours':>10}{'reference':>11}{'ratio':>8}{'floor':>11}  ok", flush=True)


def print_rows(title: str, floors: list[Floor], ours: Figures, theirs: Figures) -> bool:
    """Print a block of the table. Return True if every floor in it holds."""
    print(title)
    held = True
    for floor in floors:
        mine, other = ours[floor.figure], theirs[floor.figure]
        holds = floor.holds(mine, other)
        held &= holds is not False
        ratio = f"{mine / other:8.3f}" if other else f"{'':8}"
        verdict = {None: "", True: "ok", False: "MISSED"}[holds]
        label = f"  {floor.label}, {floor.unit}"
        print(f"{label:58}{mine:10.2f}{other:11.2f}{ratio}{floor.words:>11}  {verdict}", flush=True)
    return held


SIZES = {"small": 512, "medium": 32_000, "large": 151_000}
TEXT = "The quick brown fox jumps over the lazy dog. " * 4
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ABSENT = ("chat_template.jinja", "special_tokens_map.json", "added_tokens.json")
COMMIT = "b" * 40

FLOORS = [
    Floor("time_ms", "time", "ms", share=0.1),
    Floor("memory_mb", "growth of memory", "MB", share=0.1),
    Floor("own_mb", "growth of memory of its own", "MB", share=0.1),
    Floor("beyond_ms", "time beyond the library", "ms"),
    Floor("beyond_mb", "memory beyond the library", "MB"),
]


# ------------------------------------------------------------------------------------------ the files


def write_cache(root: Path) -> None:
    """Write a cache in the layout of the hub's library, with a repository for each size."""
    for name, size in SIZES.items():
        repository = root / "hub" / f"models--bench--{name}"
        snapshot, absent = repository / "snapshots" / COMMIT, repository / ".no_exist" / COMMIT
        for folder in (snapshot, absent, repository / "refs"):
            folder.mkdir(parents=True)
        (repository / "refs" / "main").write_text(COMMIT)
        for missing in ABSENT:
            (absent / missing).touch()
        write_tokenizer(snapshot, size)


def write_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer of random byte pairs like trained ones: short tokens, each made of two others."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    rng = random.Random(size)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [character for character in alphabet if character.isascii() and character.isalpha()]
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    merges, pool = [], list(vocabulary)
    while len(vocabulary) < size - len(SPECIAL):
        left = rng.choice(pool if rng.random() < 0.7 else letters)
        right = rng.choice(letters if rng.random() < 0.6 else pool)
        if len(left + right) > 10 or left + right in vocabulary:
            continue
        vocabulary[left + right] = len(vocabulary)
        merges.append((left, right))
        pool.append(left + right)
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    listed = {str(tokenizer.token_to_id(token)): {"content": token, **flags} for token in SPECIAL}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "added_tokens_decoder": listed,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))  # the reference reads it


# ------------------------------------------------------------------------------------------ one process


def measure(who: str, name: str) -> Figures:
    """Import a client, load a tokenizer with it and encode a text. Return the figures without the import."""
    load: Any
    if who == "ours":
        from tinker_sync import SamplingClient, ServiceClient, TrainingClient  # noqa: F401  # what a script has

        def load() -> Any:
            from tinker_sync import get_tokenizer

            return get_tokenizer(f"bench/{name}")

    elif who == "reference":
        import tinker  # noqa: F401
        from tinker.lib.public_interfaces import sampling_client

        def load() -> Any:
            return sampling_client._load_tokenizer_from_model_info(f"bench/{name}")

    else:

        def load() -> Any:
            from tokenizers import Tokenizer

            place = Path(os.environ["HF_HOME"], "hub", f"models--bench--{name}", "snapshots", COMMIT)
            return Tokenizer.from_file(str(place / "tokenizer.json"))

    before = {name: resident_mb(name) for name in ("VmRSS", "RssAnon")}
    began = time.perf_counter()
    tokenizer = load()
    ids = tokenizer.encode(TEXT)
    took_s = time.perf_counter() - began
    made = ids if isinstance(ids, list) else ids.ids
    return {
        "time_ms": took_s * 1000,
        "memory_mb": resident_mb("VmRSS") - before["VmRSS"],
        "own_mb": resident_mb("RssAnon") - before["RssAnon"],
        "checksum": float(sum(index * token for index, token in enumerate(made))),
    }


def compare(pythons: dict[str, str], name: str, rounds: int) -> dict[str, Figures]:
    runs: dict[str, list[Figures]] = {who: [] for who in pythons}
    for number in range(rounds + 1):
        for who, python in pythons.items():
            figures = run_in_fresh_process([python, __file__, "--measure", who, name], limit_s=120)
            if number:  # the first warms the file cache
                runs[who].append(figures)
    found = {who: medians(taken) for who, taken in runs.items()}
    assert len({figures["checksum"] for figures in found.values()}) == 1, "they encode differently"
    for who in ("ours", "reference"):
        found[who]["beyond_ms"] = found[who]["time_ms"] - found["library"]["time_ms"]
        found[who]["beyond_mb"] = found[who]["memory_mb"] - found["library"]["memory_mb"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter with tinker_sync's dependencies"
    )
    parser.add_argument("--reference-python", help="interpreter with the reference client")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--measure", nargs=2, metavar=("WHO", "NAME"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return 0
    if not arguments.reference_python:
        parser.error("--reference-python is needed")

    use_two_cores()
    pythons = {
        "ours": arguments.python,
        "reference": arguments.reference_python,
        "library": arguments.python,
    }
    held = True
    with tempfile.TemporaryDirectory() as root:
        os.environ |= {"HF_HOME": root, "HF_HUB_OFFLINE": "1"}
        for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            os.environ.pop(name, None)
        write_cache(Path(root))
        print(f"medians of {arguments.rounds} processes each")
        print_head()
        for name, size in SIZES.items():
            found = compare(pythons, name, arguments.rounds)
            title = f"{name}: {size} tokens"
            held &= print_rows(title, FLOORS, found["ours"], found["reference"])
    return 0 if held else 1


if __name__ == "__main__":
    raise SystemExit(main())
