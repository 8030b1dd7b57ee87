"""An evaluation of 2,000 prompts that survives a crash: a second run goes on where the first broke off."""

from __future__ import annotations

import random
import tempfile

import tinker_sync as tinker

MODEL = "tinker-sync/tiny"
PROMPTS = 2000


def evaluate(file: str, *, stop_after: int = PROMPTS) -> None:
    """Sample answers to sums, and print how many are right. Answers are saved to `file`, and read from it."""
    rng = random.Random(1)
    sums = [(rng.randint(1, 49), rng.randint(1, 49)) for _ in range(PROMPTS)]
    prompts = [f"Q: {one}+{two}=" for one, two in sums]
    params = tinker.SamplingParams(max_tokens=4, temperature=0.0, stop=["\n"])
    done = saved = right = 0
    with tinker.ServiceClient(base_url="local") as service:
        sampling = service.create_sampling_client(base_model=MODEL)
        for item in sampling.map(prompts, params, save_to=file):
            done += 1
            saved += item.saved
            right += item.ok and item.texts[0].strip() == str(sum(sums[item.index]))
            if done == stop_after:
                break  # in place of a crash
    print(f"{done} answers, {saved} of them from the file: {right / done:.1%} are right")


def main() -> None:
    """Run the evaluation twice; the first run stops early."""
    with tempfile.TemporaryDirectory() as directory:
        evaluate(f"{directory}/answers.jsonl", stop_after=PROMPTS // 3)
        evaluate(f"{directory}/answers.jsonl")


if __name__ == "__main__":
    main()
