"""Training examples made from prompts with completions, from chats, and from samples with advantages.

This package shifts each example by one position, once: position i of `model_input` predicts
`target_tokens[i]`. It does no I/O, and any thread may call it.

    completion   from_completion     a prompt and its completion; the shift of a row of tokens
    chats        from_chat           a chat, trained on the assistant's tokens
    samples      from_sample(s)      samples with log-probabilities and advantages
"""

from __future__ import annotations

from tinker_sync.data.chats import from_chat
from tinker_sync.data.completion import from_completion
from tinker_sync.data.samples import from_sample, from_samples

__all__ = ["from_chat", "from_completion", "from_sample", "from_samples"]
