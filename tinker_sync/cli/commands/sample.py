"""`tinker-sync sample`: prompts from an argument, a file or a pipe, and their samples as they arrive."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from attrs import frozen

from tinker_sync.cli.failures import PARTIAL, CliError
from tinker_sync.cli.formatting import format_count
from tinker_sync.cli.framework import Cli, command

if TYPE_CHECKING:
    from concurrent.futures import Future

    from tinker_sync.clients.sampling import SamplingClient
    from tinker_sync.data.tokenizer import Tokenizer
    from tinker_sync.types import SampleResponse, SamplingParams

# Each sample is a request with its own seed: the samples of a prompt get consecutive seeds.
_SEEDS: Final = 2**31


@frozen
class _Prompt:
    number: int
    tokens: list[int]


@command(
    "sample",
    example='tinker-sync sample "Once upon a time" --model tinker-sync/tiny -n 4 --max-tokens 40\n'
    "tinker-sync sample --path tinker://RUN/sampler_weights/NAME --file prompts.txt --lines -f jsonl",
)
@click.argument("prompt", required=False)
@click.option("--model", metavar="NAME", help="Sample from this base model; see tinker-sync model list.")
@click.option("--path", metavar="PATH", help="Sample from these weights, tinker://RUN/sampler_weights/NAME.")
@click.option(
    "--file", "file", type=click.Path(dir_okay=False), help="Read the prompt from a file; - is stdin."
)
@click.option("--lines", is_flag=True, help="Treat each line of the input as a separate prompt.")
@click.option(
    "--tokens", is_flag=True, help="Read prompts and print samples as token ids, separated by spaces."
)
@click.option(
    "--chat", is_flag=True, help="Send the prompt as a user message, in the chat template of the model."
)
@click.option(
    "-n",
    "--num-samples",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of samples per prompt.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Maximum number of tokens to generate per sample.",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=1.0,
    show_default=True,
    help="Sampling temperature; 0 always takes the likeliest token.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Sample from the likeliest tokens that together have this probability.",
)
@click.option(
    "--top-k", type=int, default=-1, help="Sample from this many of the likeliest tokens; -1 means all."
)
@click.option("--seed", type=click.IntRange(min=0), help="Random seed; the same seed gives the same samples.")
@click.option("--stop", multiple=True, metavar="TEXT", help="Stop generating at this text; repeatable.")
def sample(
    cli: Cli,
    prompt: str | None,
    model: str | None,
    path: str | None,
    file: str | None,
    lines: bool,
    tokens: bool,
    chat: bool,
    num_samples: int,
    stop: Sequence[str],
    **params: Any,
) -> None:
    """Sample continuations of PROMPT, of a file, or of a prompt from a pipe.

    Each sample is printed when it arrives; with --format json, all are printed together at the end. With
    --format jsonl, each sample is a line with its text, tokens, log-probabilities and stop reason. If the
    tokenizer of the model is not available, prompts and samples are token ids. Exit code 3: some samples
    failed; each of these is listed.
    """
    if bool(model) == bool(path):
        raise click.UsageError("give either --model NAME or --path PATH")
    if model and model.startswith("tinker://"):
        raise click.UsageError(f"--model takes the name of a base model; for weights give --path {model}")
    if path and "://" not in path:
        raise click.UsageError(
            f"--path takes the path of weights, tinker://RUN/sampler_weights/NAME; for a base model give "
            f"--model {path}"
        )
    texts = list(_read_prompts(prompt, file, lines))
    with cli.service() as service:
        client = service.create_sampling_client(path, model)
        client.result()  # a wrong name is no lack of a tokenizer
        tokenizer = None if tokens else _load_tokenizer(cli, client)
        prompts = [_Prompt(number, _encode(text, tokenizer, chat)) for number, text in enumerate(texts)]
        wanted = _make_params(params, stop, tokenizer)
        futures = _submit(client, prompts, num_samples, wanted, params["seed"])
        failed = _print_samples(cli, futures, tokenizer, many=len(futures) > 1)
    if failed:
        raise CliError(f"{format_count(failed, 'sample')} of {len(futures)} failed", code=PARTIAL)


# ------------------------------------------------------------------------------------------ prompts


def _read_prompts(prompt: str | None, file: str | None, lines: bool) -> Iterator[str]:
    if prompt is not None and file is not None:
        raise click.UsageError("give either PROMPT or --file FILE")
    if prompt is not None and prompt != "-":
        text = prompt
    elif file is not None and file != "-":
        text = _read_text(lambda: Path(file).read_text(encoding="utf-8"))
    elif sys.stdin.isatty():
        raise click.UsageError("give a PROMPT, --file FILE, or a prompt through a pipe")
    else:
        text = _read_text(sys.stdin.read)
    if not lines:
        # The last line break of a file is not part of the prompt.
        yield text if prompt is not None else text.removesuffix("\n")
        return
    found = [line for line in text.splitlines() if line.strip()]
    if not found:
        raise CliError("there is no prompt: every line is empty")
    yield from found


def _read_text(read: Callable[[], str]) -> str:
    try:
        text = read()
        text.encode()  # in some locales a pipe turns invalid bytes into lone surrogates
    except UnicodeError as error:
        raise CliError(
            f"the prompt is not text in UTF-8 from position {getattr(error, 'start', 0)} on",
            "Write it in UTF-8, or give token ids with --tokens.",
        ) from error
    return text


def _load_tokenizer(cli: Cli, client: SamplingClient) -> Tokenizer | None:
    from tinker_sync.errors import TinkerError

    try:
        return client.get_tokenizer()
    except TinkerError as error:
        cli.sink.say(f"No tokenizer: {error}\nPrompts and samples are token ids.")
        return None


def _encode(text: str, tokenizer: Tokenizer | None, chat: bool) -> list[int]:
    if tokenizer is None:
        try:
            tokens = [int(part) for part in text.replace(",", " ").split()]
        except ValueError:
            raise CliError(
                "the prompt is text, but there is no tokenizer for it",
                "Give token ids instead, such as --tokens '101 2023'.",
            ) from None
    elif chat:
        made: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True
        )
        tokens = list(made["input_ids"] if hasattr(made, "keys") else made)
    else:
        tokens = [int(token) for token in tokenizer.encode(text)]
    if not tokens:
        raise CliError("the prompt is empty", "Give a text as PROMPT, with --file FILE or through a pipe.")
    return tokens


def _make_params(params: dict[str, Any], stop: Sequence[str], tokenizer: Tokenizer | None) -> SamplingParams:
    from tinker_sync.types import SamplingParams

    ends: Any = list(stop) or None
    if stop and tokenizer is None:
        try:
            ends = [int(each) for each in stop]
        except ValueError:
            raise CliError("without a tokenizer --stop takes token ids") from None
    return SamplingParams(**{**params, "stop": ends})


# ------------------------------------------------------------------------------------------ samples


def _submit(
    client: SamplingClient, prompts: Sequence[_Prompt], count: int, params: SamplingParams, seed: int | None
) -> dict[Future[SampleResponse], tuple[int, int]]:
    """Submit a request for each sample, so that each can be printed when it arrives.

    Returns:
        For each future, the number of its prompt and of its sample for this prompt, both from 0.
    """
    from tinker_sync.types import ModelInput

    futures: dict[Future[SampleResponse], tuple[int, int]] = {}
    for prompt in prompts:
        model_input = ModelInput.from_ints(prompt.tokens)
        for index in range(count):
            own = params if seed is None else params.model_copy(update={"seed": (seed + index) % _SEEDS})
            futures[client.sample(model_input, 1, own)] = (prompt.number, index)
    return futures


def _print_samples(
    cli: Cli,
    futures: dict[Future[SampleResponse], tuple[int, int]],
    tokenizer: Tokenizer | None,
    *,
    many: bool,
) -> int:
    """Print each sample as it arrives, or all as JSON at the end; return the number of failures."""
    from concurrent.futures import as_completed

    failed = 0
    gathered: dict[tuple[int, int], dict[str, Any]] = {}
    with cli.sink.progress("Sampling", len(futures), unit="samples") as bar:
        for future in as_completed(futures):
            place = futures[future]
            problem = future.exception()
            if problem is None:
                item = _make_item(place, future.result(), tokenizer)
                bar.aside(partial(_print_item, cli, item, many))
                gathered[place] = item
            else:
                failed += 1
                where = f"prompt {place[0] + 1}, sample {place[1] + 1}"
                bar.aside(partial(cli.sink.complain, f"{where} failed: {problem}"))
            bar.advance()
    if cli.sink.form == "json":
        cli.sink.show_data({"samples": [gathered[place] for place in sorted(gathered)]})
    return failed


def _make_item(
    place: tuple[int, int], response: SampleResponse, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    sequence = response.sequences[0]
    item: dict[str, Any] = {"prompt": place[0], "sample": place[1]}
    if tokenizer is not None:
        item["text"] = tokenizer.decode(sequence.tokens, skip_special_tokens=True)
    return {
        **item,
        "tokens": sequence.tokens,
        "logprobs": sequence.logprobs,
        "stop_reason": sequence.stop_reason,
    }


def _print_item(cli: Cli, item: dict[str, Any], many: bool) -> None:
    if cli.sink.form == "jsonl":
        cli.sink.item(item)
    elif cli.sink.form == "table":
        if many:
            about = f"{format_count(len(item['tokens']), 'token')}, {item['stop_reason']}"
            cli.sink.text(
                f"--- prompt {item['prompt'] + 1}, sample {item['sample'] + 1}: {about}", "bright_black"
            )
        cli.sink.raw(item["text"] if "text" in item else " ".join(map(str, item["tokens"])))
