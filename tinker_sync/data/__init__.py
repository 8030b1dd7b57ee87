"""Training examples from what scripts have: prompts with completions, chats, samples with advantages.

Each is shifted by one position exactly once, here: position i of `model_input` predicts `target_tokens[i]`.

    completion   from_completion     a prompt, and what should have come after it
    chats        from_chat           a chat, trained on what the assistant says
    samples      from_sample(s)      what was sampled, with its log-probabilities and advantages
    shift        the shift itself
    mask         where in a chat the assistant speaks
"""

from __future__ import annotations

from tinker_sync.data.chats import from_chat
from tinker_sync.data.completion import from_completion
from tinker_sync.data.samples import from_sample, from_samples

__all__ = ["from_chat", "from_completion", "from_sample", "from_samples"]
