"""Tokenizers of five kinds, which this module trains and writes to files, and texts of every script."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer, UnigramTrainer, WordPieceTrainer

# The first and last code points of Unicode blocks.
BLOCKS = {
    "ascii": (0x20, 0x7E), "controls": (0x00, 0x1F), "latin-1": (0xA0, 0xFF),
    "latin extended": (0x100, 0x24F), "phonetic": (0x250, 0x2AF), "combining": (0x300, 0x36F),
    "greek": (0x370, 0x3FF), "cyrillic": (0x400, 0x52F), "armenian": (0x531, 0x58A),
    "hebrew": (0x591, 0x5F4), "arabic": (0x600, 0x6FF), "syriac": (0x700, 0x74F), "thaana": (0x780, 0x7B1),
    "nko": (0x7C0, 0x7FA), "devanagari": (0x900, 0x97F), "bengali": (0x980, 0x9FE),
    "gurmukhi": (0xA01, 0xA76), "gujarati": (0xA81, 0xAFF), "oriya": (0xB01, 0xB77),
    "tamil": (0xB82, 0xBFA), "telugu": (0xC00, 0xC7F), "kannada": (0xC80, 0xCF2),
    "malayalam": (0xD00, 0xD7F), "sinhala": (0xD82, 0xDF4), "thai": (0xE01, 0xE5B), "lao": (0xE81, 0xEDF),
    "tibetan": (0xF00, 0xFDA), "myanmar": (0x1000, 0x109F), "georgian": (0x10A0, 0x10FF),
    "jamo": (0x1100, 0x11FF), "ethiopic": (0x1200, 0x139F), "cherokee": (0x13A0, 0x13FD),
    "canadian syllabics": (0x1400, 0x167F), "ogham": (0x1680, 0x169C), "runic": (0x16A0, 0x16F8),
    "khmer": (0x1780, 0x17F9), "mongolian": (0x1800, 0x18AA), "balinese": (0x1B00, 0x1B7E),
    "greek extended": (0x1F00, 0x1FFE), "spaces and joiners": (0x2000, 0x206F),
    "currency": (0x20A0, 0x20C0), "letterlike": (0x2100, 0x214F), "arrows": (0x2190, 0x21FF),
    "mathematics": (0x2200, 0x22FF), "boxes": (0x2500, 0x257F), "symbols": (0x2600, 0x27BF),
    "braille": (0x2800, 0x28FF), "glagolitic": (0x2C00, 0x2C5F), "coptic": (0x2C80, 0x2CFF),
    "tifinagh": (0x2D30, 0x2D7F), "kangxi": (0x2F00, 0x2FD5), "cjk marks": (0x3000, 0x303F),
    "hiragana": (0x3041, 0x309F), "katakana": (0x30A0, 0x30FF), "bopomofo": (0x3105, 0x312F),
    "han": (0x4E00, 0x9FFF), "yi": (0xA000, 0xA48C), "hangul": (0xAC00, 0xD7A3),
    "private": (0xE000, 0xE0FF), "han compatibility": (0xF900, 0xFAFF),
    "presentation forms": (0xFB00, 0xFDCF), "half and full width": (0xFF01, 0xFFEE),
    "specials": (0xFFF9, 0xFFFD), "linear b": (0x10000, 0x100FA), "gothic": (0x10330, 0x1034A),
    "cuneiform": (0x12000, 0x1236E), "hieroglyphs": (0x13000, 0x1342E), "adlam": (0x1E900, 0x1E959),
    "mathematical letters": (0x1D400, 0x1D7FF), "emoji": (0x1F300, 0x1F64F),
    "flags and skin": (0x1F1E6, 0x1F1FF), "more emoji": (0x1F900, 0x1FAFF),
    "han extension b": (0x20000, 0x2A6DF), "tags": (0xE0020, 0xE007F),
}  # fmt: skip
SPECIALS = [
    "<s>", "</s>", "<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "<|im_start|>", "<|im_end|>", "<tool>",
    "¶",
]  # fmt: skip
PIECES = [
    " ", "  ", "\n", "\r\n", "\t", "\u3000", "\u00a0", "\u200b", "\ufeff", ". ", " .", " , ", " n't", "'s",
    "123",
]  # fmt: skip
WORDS = """
the quick brown fox jumps over lazy dogs and then it is don't can't 3.14 hello world training sampling
reward Größe façade naïve Привет мир добрый день γειά σου κόσμε שלום עולם مرحبا بالعالم नमस्ते दुनिया
สวัสดีชาวโลก 你好 世界 训练 こんにちは 世界 안녕하세요 세계 🙂 👩‍👩‍👧 🇩🇪 e\u0301 ﬁn
""".split()  # noqa: RUF001, SIM905  # letters that look like others are meant


def text(rng: random.Random) -> str:
    """Return a random text of words, characters of one block, spaces and lookalikes of special tokens."""
    made = []
    for _ in range(rng.randrange(0, 9)):
        kind = rng.random()
        if kind < 0.45:
            made.append(" ".join(rng.choices(WORDS, k=rng.randrange(1, 6))))
        elif kind < 0.85:
            first, last = BLOCKS[rng.choice(list(BLOCKS))]
            made.append("".join(chr(rng.randint(first, last)) for _ in range(rng.randrange(1, 9))))
        elif kind < 0.95:
            made.append(rng.choice(PIECES))
        else:
            made.append(rng.choice(SPECIALS))
        made.append(rng.choice(["", "", " "]))
    return "".join(made)


def texts(count: int, seed: int = 6) -> list[str]:
    """Return random texts. The first hundred have characters of every block."""
    rng = random.Random(seed)
    whole = ["".join(map(chr, range(first, min(first + 64, last + 1)))) for first, last in BLOCKS.values()]
    return [*whole, *(text(rng) for _ in range(count - len(whole)))]


def corpus() -> Iterator[str]:
    rng = random.Random(1)
    for _ in range(400):
        yield " ".join(rng.choices(WORDS, k=12))


# ------------------------------------------------------------------------------------------- five kinds


def _write(folder: Path, backend: Tokenizer, config: dict[str, Any], **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}), encoding="utf-8"
    )
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content, encoding="utf-8")
    return folder


def _token(content: str, **flags: bool) -> dict[str, Any]:
    usual = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content, **usual, **flags}


def _byte_level(special: list[str]) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(corpus(), trainer)
    return backend


def byte_level(folder: Path) -> Path:
    """Write a byte-level BPE tokenizer like those of newer models, with a split by a pattern."""
    backend = _byte_level(["<|endoftext|>"])
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
    )
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    listed = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens(listed)
    ids = {backend.token_to_id(token): _token(token) for token in listed}
    config = {
        "added_tokens_decoder": {str(index): token for index, token in ids.items()},
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": True,
        "model_max_length": 131072,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "image_token": "<|im_start|>",
    }
    return _write(folder, backend, config)


def word_piece(folder: Path) -> Path:
    """Write a WordPiece tokenizer in lower case, with special tokens around texts and clean-up of spaces."""
    backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(
        corpus(), WordPieceTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    )
    pairs = [("[CLS]", backend.token_to_id("[CLS]")), ("[SEP]", backend.token_to_id("[SEP]"))]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=pairs
    )
    backend.enable_truncation(24)
    backend.enable_padding(pad_token="[PAD]", pad_id=backend.token_to_id("[PAD]"))
    config = {
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": {"__type": "AddedToken", **_token("[MASK]", lstrip=True)},
        "clean_up_tokenization_spaces": True,
        "model_max_length": 512,
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }
    return _write(folder, backend, config)


def unigram(folder: Path) -> Path:
    """Write a Unigram tokenizer with a prefix space and an end token after every text."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    backend.train_from_iterator(
        corpus(),
        UnigramTrainer(vocab_size=500, special_tokens=special, unk_token="<unk>", show_progress=False),
    )
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", backend.token_to_id("</s>"))]
    )
    config = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "add_eos_token": False}
    return _write(folder, backend, config)


def added_tokens(folder: Path) -> Path:
    """Write a tokenizer with added tokens of every flag, some of them only in the configuration."""
    backend = _byte_level(["<s>", "</s>", "<unk>"])
    backend.add_tokens(
        [
            AddedToken("¶", lstrip=True, rstrip=True),
            AddedToken("hello", single_word=True),
            AddedToken("GRÖSSE", normalized=True),
            AddedToken("<eot>", special=False),
        ]
    )
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
            ),
        ]
    )
    size = backend.get_vocab_size()
    listed = {
        **{str(backend.token_to_id(token)): _token(token) for token in ("<s>", "</s>", "<unk>")},
        str(backend.token_to_id("<eot>")): _token("<eot>", special=False),
        str(backend.token_to_id("¶")): _token("¶", special=False, rstrip=True),
        str(size): _token("<tool>", special=False),
        str(size + 1): _token("  wide  ", special=False, lstrip=True),
    }
    config = {
        "added_tokens_decoder": listed,
        "add_bos_token": True,
        "add_eos_token": True,
        "bos_token": "<s>",
        "eos_token": "<eot>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "extra_special_tokens": ["<more>", "</s>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 64,
        "padding_side": "left",
        "truncation_side": "left",
    }
    return _write(folder, backend, config)


CHAT_TEMPLATE = """\
{%- macro show(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if part.type == 'text' %}
                {{- part.text }}
            {%- elif part.type == 'image' %}
                {{- '<image>' }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- show(messages[0].content) + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + show(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- set state = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set state.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
        {%- continue %}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        {%- if message.reasoning_content %}
            {{- '<think>' + message.reasoning_content | trim + '</think>' }}
        {%- endif %}
        {{- show(message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name + ' ' + call.function.arguments | tojson(indent=2) }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role in ('user', 'system', 'tool') %}
        {{- '<|im_start|>' + message.role + '\\n' + show(message.content) + '<|im_end|>' }}

    {%- else %}
        {{- raise_exception('no such role: ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
"""

PLAIN_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
    {% if message['role'] == 'assistant' %}
{{ message['content'] }}{{ eos_token }}
    {% else %}
[{{ message['role'] | upper }}] {{ message['content'] | trim }} [/]
    {% endif %}
{% endfor %}
{{- '' if not add_generation_prompt else '[GO]' }}"""


def chat(folder: Path) -> Path:
    """Write a tokenizer with two chat templates in separate files: one that knows tools, and a plain one."""
    byte_level(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    (folder / "additional_chat_templates" / "plain.jinja").write_text(PLAIN_TEMPLATE, encoding="utf-8")
    return folder


KINDS: dict[str, Callable[[Path], Path]] = {
    "byte-level": byte_level,
    "word-piece": word_piece,
    "unigram": unigram,
    "added-tokens": added_tokens,
    "chat": chat,
}
