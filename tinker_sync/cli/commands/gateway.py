"""`tinker-sync gateway`: chat endpoints over a model or over weights, until Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from tinker_sync.cli.framework import Cli, command
from tinker_sync.errors import ConfigurationError

KEY_VARIABLE = "TINKER_GATEWAY_KEY"


@command(
    "gateway",
    example="tinker-sync gateway --model-path tinker://RUN/sampler_weights/NAME --record exchanges.jsonl\n"
    "tinker-sync gateway --base-url local --model tinker-sync/tiny --port 8001",
)
@click.option("--model-path", metavar="PATH", help="Serve these weights, tinker://RUN/sampler_weights/NAME.")
@click.option("--model", metavar="NAME", help="Serve this base model; see tinker-sync model list.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="The port to listen on; 0: a free one."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--key-file",
    type=click.Path(dir_okay=False),
    help=f"A file with the key that programs must send; default: {KEY_VARIABLE}, or no key.",
)
@click.option(
    "--record", type=click.Path(dir_okay=False), help="Append prompts, answers and their tokens to this file."
)
@click.option(
    "--max-tokens", type=click.IntRange(min=1), help="The longest answer to a request that sets no limit."
)
@click.option(
    "--chat-template",
    type=click.Path(dir_okay=False),
    help="A file with another chat template than the model's.",
)
def gateway(
    cli: Cli,
    model_path: str | None,
    model: str | None,
    port: int,
    host: str,
    key_file: str | None,
    record: str | None,
    max_tokens: int | None,
    chat_template: str | None,
) -> None:
    """Serve chats as OpenAI and Anthropic do, for agents and other programs, until Ctrl-C.

    When the gateway is ready, the command prints its address, as JSON with --format json. For programs that
    speak OpenAI's API, the base URL is the address with /v1. Other machines can reach the gateway if --host
    allows it; then it needs a key.
    """
    if bool(model) == bool(model_path):
        raise click.UsageError("give either --model-path PATH or --model NAME")
    key = _read(key_file).strip() if key_file else os.environ.get(KEY_VARIABLE, "").strip()
    template = _read(chat_template) if chat_template else None
    from tinker_sync.types import SamplingParams

    with _until_signal() as stopped, cli.service() as service:
        sampling = service.create_sampling_client(model_path, model)
        sampling.result()
        with sampling.endpoint(
            host=host,
            port=port,
            key=key or None,
            sampling_params=SamplingParams(max_tokens=max_tokens),
            chat_template=template,
            # Without a file, nothing is kept, because nobody could read it.
            record=record or os.devnull,
        ) as serving:
            if cli.sink.for_people:
                cli.sink.say(f"Serving {sampling.get_base_model()} on {serving.url}; Ctrl-C ends it.")
                cli.sink.raw(serving.url)
            else:
                cli.sink.item({"url": serving.url, "openai_base_url": serving.openai_base_url()})
            stopped.wait()


@contextmanager
def _until_signal() -> Iterator[threading.Event]:
    """Within the block, SIGINT and SIGTERM set an event, which is the value of the block."""
    stopped = threading.Event()
    before = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, lambda *_: stopped.set())
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as problem:
        raise ConfigurationError(f"{path} cannot be read: {problem}") from problem
