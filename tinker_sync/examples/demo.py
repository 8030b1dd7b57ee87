"""`tinker-sync demo`: a small model learns to sort digits, in a process that this program kills halfway."""

from __future__ import annotations

import inspect
import multiprocessing
import operator
import random
import tempfile
import textwrap
from collections.abc import Callable
from multiprocessing.connection import Connection

import tinker_sync as tinker
from tinker_sync import data

MODEL = "tinker-sync/tiny"  # has never seen this task; `base_url="local"` is a server on this machine
STEPS, BATCH, SAVE_EVERY = 80, 64, 20
KILLED_AFTER = 43  # steps, so that three of them come after the last save
EXAM = ["".join(random.Random(f"exam {n}").choices("0123456789", k=5)) for n in range(40)]
NEXT = {
    "python -m tinker_sync.examples.rewards": "the same model learns from rewards alone",
    "python -m tinker_sync.examples.notebook": "a notebook with samples, tables and curves",
    "tinker-sync auth login": "on the hosted service: store a key, then leave out base_url",
}


def sort(digits: str) -> str:
    """Return the right answer."""
    return "".join(sorted(digits))


def learn_to_sort(
    service: tinker.ServiceClient, directory: str, report: Callable[[int, float], object]
) -> tinker.TrainingClient:
    """Train from the latest save in `directory`, or from the beginning, and report the loss of each step."""
    saves = service.checkpoints(directory, every=SAVE_EVERY)
    training, first = saves.resume() or (service.create_lora_training_client(MODEL, rank=16, seed=0), 0)
    tokenizer = training.get_tokenizer()
    for step in range(first, STEPS):
        rng = random.Random(step)  # the step decides its data, so a resumed run repeats none
        lesson = ["".join(rng.choices("0123456789", k=rng.randint(3, 5))) for _ in range(BATCH)]
        batch = [
            data.from_completion(f"sort: {digits} ->", f" {sort(digits)}\n", tokenizer)
            for digits in lesson
            if digits not in EXAM
        ]
        passed = training.forward_backward(batch, "cross_entropy")
        rate = 7e-3 * min(1.0, 2 * (1 - step / STEPS))
        training.optim_step(tinker.AdamParams(learning_rate=rate)).result()
        report(step, passed.result().metrics["loss:mean"])
        saves.after_step(training, step)
    return training


def answer_exam(training: tinker.TrainingClient) -> list[str]:
    """Return the likeliest answer to each problem of the exam."""
    sampling = training.save_weights_and_get_sampling_client()
    params = tinker.SamplingParams(max_tokens=8, temperature=0.0, stop=["\n"])
    prompts = [f"sort: {digits} ->" for digits in EXAM]
    return [item.texts[0].strip() for item in sampling.map(prompts, params, progress=False, on_error="raise")]


# What follows shows the training, and kills it once.


def show_step(step: int, loss: float) -> None:
    """Print every fifth step with a bar as long as its loss."""
    if step % 5 == 0 or step == STEPS - 1:
        print(f"step {step:2}  loss {loss:.2f}  {'#' * round(8 * loss)}", flush=True)


def train_elsewhere(directory: str, losses: Connection) -> None:
    """Train in a process of its own, and send the losses."""
    with tinker.ServiceClient(base_url="local") as service:
        learn_to_sort(service, directory, lambda _, loss: losses.send(loss))


def train_and_kill(directory: str) -> list[float]:
    """Train in another process, kill it after `KILLED_AFTER` steps, and return the losses until then."""
    context = multiprocessing.get_context("spawn")
    received, sent = context.Pipe(duplex=False)
    process = context.Process(target=train_elsewhere, args=(directory, sent))
    process.start()
    sent.close()  # so that `recv` raises EOFError if the process ends by itself
    losses: list[float] = []
    try:
        while len(losses) < KILLED_AFTER:
            losses.append(received.recv())
            show_step(len(losses) - 1, losses[-1])
    finally:
        process.kill()
        process.join()
    print(f"\nThis demo has killed the process after {len(losses)} steps (exit code {process.exitcode}).")
    return losses


def main() -> bool:
    """Run the demo. Return True if the model has learned, and the resumed run has lost nothing."""
    print(
        f"{MODEL} learns to sort digits: {STEPS} steps of {BATCH} examples, on this machine, without a key."
    )
    print(f"Another process trains first. This demo kills it after {KILLED_AFTER} steps, as a crash would.\n")
    with tinker.ServiceClient(base_url="local") as service, tempfile.TemporaryDirectory() as directory:
        before = answer_exam(service.create_lora_training_client(MODEL, rank=16, seed=0))
        killed = train_and_kill(directory)
        saved = KILLED_AFTER // SAVE_EVERY * SAVE_EVERY
        print(f"Its last save was after {saved} steps, so {KILLED_AFTER - saved} steps are trained again:\n")
        losses: dict[int, float] = {}

        def report(step: int, loss: float) -> None:
            losses[step] = loss
            show_step(step, loss)

        after = answer_exam(learn_to_sort(service, directory, report))
    lost, again = (
        ", ".join(f"{curve[step]:.4f}" for step in range(saved, KILLED_AFTER)) for curve in (killed, losses)
    )
    print(f"\nTheir losses were {lost} before the kill, and {again} after it.")
    print("A loss is the mean negative log-probability of a token of the right answers.\n")
    print(f"{'prompt':18}{'before':12}after")
    for digits, one, two in [*zip(EXAM, before, after, strict=True)][:6]:
        print(f"sort: {digits} ->    {one:12.10}{two:.10}")
    failed, right = (sum(map(operator.eq, answers, map(sort, EXAM))) for answers in (before, after))
    print(f"\n{right} of {len(EXAM)} new problems are right. Before the training, {failed} were.\n")
    print("The code that did this, from tinker_sync/examples/demo.py:\n")
    print(textwrap.indent(inspect.getsource(learn_to_sort), "    "))
    print("Next:\n")
    for command, what in NEXT.items():
        print(f"  {command:42}{what}")
    return lost == again and right - failed > len(EXAM) // 2


if __name__ == "__main__":
    main()
