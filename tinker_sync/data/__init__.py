"""Tokenizers and chat templates, and the training examples that are made with them.

An example is shifted by one position, once: position i of `model_input` predicts `target_tokens[i]`. Any
thread may call the functions. Only `get_tokenizer` reads files, and downloads what the hub's cache lacks.

    completion      from_completion     a prompt and its completion; the shift of a row of tokens
    chats           from_chat           a chat, trained on the assistant's tokens
    conversation    Conversation        a chat with sampled answers, turn by turn, and its data
    answers         read_answer         a sampled answer as a message, with its tool calls
    samples         from_sample(s)      samples with log-probabilities and advantages
    tokenizer       get_tokenizer       text as token ids and back, without a machine-learning framework
    chat_template   ChatTemplate        chats as text; needs the extra `chat`
    hub             find                the files of a model's tokenizer
"""

from __future__ import annotations

from tinker_sync.data.chats import from_chat
from tinker_sync.data.completion import from_completion
from tinker_sync.data.conversation import Conversation, Turn
from tinker_sync.data.samples import from_sample, from_samples
from tinker_sync.data.tokenizer import Encoded, Tokenizer, get_tokenizer

__all__ = [
    "Conversation",
    "Encoded",
    "Tokenizer",
    "Turn",
    "from_chat",
    "from_completion",
    "from_sample",
    "from_samples",
    "get_tokenizer",
]
