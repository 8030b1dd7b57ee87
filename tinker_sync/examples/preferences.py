"""DPO: from pairs of stories, a model learns to prefer short ones. It stops when held-out pairs are clear."""

from __future__ import annotations

from collections.abc import Sequence

import tinker_sync as tinker
from tinker_sync import data
from tinker_sync.losses import DPO, dpo_pairs, with_reference

MODEL, RATE = "tinker-sync/tiny", 6e-3  # a large model takes a rate of about 1e-5
STORIES, BATCHES, STEPS, ENOUGH = 32, 4, 40, 2.0
CHAT = [{"role": "user", "content": "Tell me a story."}]


def make_pairs(prompt: tinker.ModelInput, stories: Sequence[tinker.SampledSequence]) -> list[tinker.Datum]:
    """Return pairs for `DPO` from neighbouring stories, of which the shorter one is better."""
    pairs = zip(stories[::2], stories[1::2], strict=True)
    ordered = [sorted(pair, key=lambda story: len(story.tokens)) for pair in pairs]
    better = [data.from_completion(prompt.to_ints(), pair[0].tokens) for pair in ordered]
    worse = [data.from_completion(prompt.to_ints(), pair[1].tokens) for pair in ordered]
    return dpo_pairs(better, worse)


def tell(
    sampling: tinker.SamplingClient, prompt: tinker.ModelInput, count: int
) -> list[tinker.SampledSequence]:
    """Return sampled stories, which may go on to their end token."""
    params = tinker.SamplingParams(max_tokens=96, stop=["<|im_end|>"], seed=1)
    return sampling.sample(prompt, count, params).result().sequences


def main() -> None:
    """Train until the margin of held-out pairs is `ENOUGH`, because far beyond it a model breaks."""
    with tinker.ServiceClient(base_url="local") as service:
        training = service.create_lora_training_client(MODEL, rank=16, seed=1)
        tokenizer = training.get_tokenizer()
        prompt = tinker.ModelInput.from_chat(CHAT, tokenizer)
        before = tell(training.save_weights_and_get_sampling_client(), prompt, STORIES * (BATCHES + 1))
        # DPO compares with the model before the training, so its log-probabilities are needed once.
        pairs = [make_pairs(prompt, before[at : at + STORIES]) for at in range(0, len(before), STORIES)]
        scores = [training.forward(batch, "cross_entropy") for batch in pairs]
        *batches, held_out = [
            with_reference(batch, score.result()) for batch, score in zip(pairs, scores, strict=True)
        ]
        loss = DPO(beta=0.3)
        print("margin: by how much more than before the model prefers the better stories of held-out pairs")
        for step in range(STEPS):
            seen = training.forward_custom(held_out, loss).result().metrics
            margin, right = seen["dpo_margin:mean"], seen["dpo_accuracy:mean"]
            print(f"step {step:2}  margin {margin:4.2f}  {right:4.0%} right  {'#' * round(30 * margin)}")
            if margin >= ENOUGH:
                break
            training.forward_backward_custom(batches[step % BATCHES], loss)
            training.optim_step(tinker.AdamParams(learning_rate=RATE)).result()
        after = tell(training.save_weights_and_get_sampling_client(), prompt, STORIES)
    for name, stories in {"before": before[-STORIES:], "after": after}.items():
        tokens = sum(len(story.tokens) for story in stories) / len(stories)
        print(f"\n{name}: {tokens:.0f} tokens in the mean of {len(stories)} stories, such as:")
        for story in stories[:3]:
            print(f"  {story.text(tokenizer).strip()}")


if __name__ == "__main__":
    main()
