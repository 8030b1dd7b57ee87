"""The tables of the reference: losses, errors, environment variables, servers, migration."""

from __future__ import annotations

import inspect
from typing import Final

from tinker_sync import errors
from tinker_sync.docs.markup import summary
from tinker_sync.local.engine.losses import LOSSES
from tinker_sync.wire.dialect import _SINCE, _UNTIL, FEATURES, Dialect

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]

# For each token, p is the model's log-probability of the target, q that of the sampler, A the advantage, w
# the weight, and r = exp(p - q).
FORMULAS: Final = {
    "cross_entropy": "`-sum(w * p)`; several weighted targets for a token are two-dimensional",
    "importance_sampling": "`-sum(r * A)`",
    "ppo": "`-sum(min(r * A, clip(r, low, high) * A))`",
    "cispo": "`-sum(clip(r, low, high) * p * A)`, the clipped ratio without gradient",
    "dro": "`-sum(p * A - beta / 2 * (p - q)**2)`",
    "gspo": "as `ppo`, with the ratio of the whole sequence: the mean of `p - q` where the mask is not zero",
}
ELSEWHERE: Final = {
    "custom": ("traced by `ServiceClient.create_custom_loss`", "as it declares", "none"),
    "stable_reinforce": (
        "needs what samples record with `record_stability_info`",
        "as the service says",
        "none",
    ),
}

VARIABLES: Final = {
    "TINKER_BASE_URL": "the server; `local` is the embedded one. Unset: the hosted service",
    "TINKER_API_KEY": "the key",
    "TINKER_CREDENTIAL_CMD": "a command that prints the key",
    "TINKER_PROJECT_ID": "the project of new sessions and copies",
    "TINKER_TAGS": "tags of new sessions, separated by commas",
    "TINKER_TELEMETRY": "`0` sends no reports of failures; the hosted service alone gets any",
    "TINKER_LOG": "`debug` or another level: log lines on stderr",
    "TINKER_PACE": "the factor for pauses before another try; for tests",
    "TINKER_PRICES": "a file with prices; else `~/.tinker/prices.json`",
    "TINKER_PROGRESS": "`0` turns progress bars off",
    "TINKER_LOCAL_DATA_DIR": "where the embedded server keeps checkpoints; unset: only while it runs",
    "TINKER_LOCAL_MODEL": "a Hugging Face directory that it offers beside its own model",
    "TINKER_LOCAL_KEY": "the key of a server that `tinker-sync serve` starts",
    "CLOUDFLARE_ACCESS_CLIENT_ID": "with the next one: headers for servers behind Cloudflare Access",
    "CLOUDFLARE_ACCESS_CLIENT_SECRET": "see above",
    "HF_HOME": "where files of tokenizers are kept, with `HF_HUB_CACHE`, `HF_TOKEN` and `HF_ENDPOINT`",
    "HF_HUB_OFFLINE": "`1` fetches no tokenizer",
}

MIGRATION: Final = [
    (
        "`import tinker`",
        "`import tinker_sync as tinker`",
        "public names of `types` and `lib` have the same module paths here; internal modules do not exist",
    ),
    (
        "0.36: `create_lora_training_client(...)` waits",
        "returns at once",
        "a client is usable at once; `.result()` and `await` wait for it, as in 0.38",
    ),
    (
        "0.38: `client.result().forward_backward(...)`",
        "works, and so does `client.forward_backward(...)`",
        "no warning for using a client before it is ready",
    ),
    ("`await client.sample_async(...)`", "works", "0.38 warns of most `_async` names; here they stay"),
    (
        "`future.result(timeout=60)`",
        "works",
        "a wait that runs out cancels nothing, also where it is awaited",
    ),
    (
        "`ValueError` for a failed request",
        "`RequestFailedError`",
        "one tree of errors; see the table of errors",
    ),
    (
        "`forward_backward_custom(data, loss)`",
        "works, and returns at once",
        "a loss that fails no longer disables the client; `numpy_loss` needs no torch",
    ),
    (
        "`get_tokenizer()` gives a `transformers` object",
        "a `Tokenizer`",
        'pass `backend="transformers"` for that one',
    ),
    ("sampler handles and pickles", "are read from every version", "they carry no key unless you ask for it"),
    ("`service.create_rest_client()`", "works", "or `RestClient(service.holder)`"),
    ("billing and audit calls of `RestClient`", "work, with a warning", "they live in `AdminClient`"),
    (
        "`tinker` on the command line",
        "`tinker-sync`",
        "the same commands and JSON, and exit code 3 for done in part",
    ),
]


def losses() -> Table:
    """Return the table of the losses of `forward_backward`, with their inputs and settings."""
    rows: list[tuple[str, ...]] = []
    for name, rule in LOSSES.items():
        needs = ", ".join(f"`{each}`" for each in rule.needs)
        may = "".join(f", `{each}` (optional)" for each in rule.may)
        settings = ", ".join(
            f"`{each}` {'has no default' if default is None else default}"
            for each, default in rule.config.items()
        )
        rows.append((f"`{name}`", FORMULAS[name], needs + may, settings or "none"))
    rows += [(f"`{name}`", *cells) for name, cells in ELSEWHERE.items()]
    return ("loss_fn", "loss, over all tokens", "inputs of a datum", "loss_fn_config and defaults"), rows


def error_rows() -> Table:
    """Return the table of the errors, with their meanings and remedies."""
    rows: list[tuple[str, ...]] = []
    for name in errors.__all__:
        kind = getattr(errors, name)
        if not (inspect.isclass(kind) and issubclass(kind, Exception)):
            continue
        parents = [
            base.__name__ for base in kind.__mro__[1:] if base not in (Exception, BaseException, object)
        ]
        advice, meaning = getattr(kind, "advice", ""), summary(kind.__doc__ or "")
        if meaning[:3].isdigit():
            meaning = f"The server answered with the status {meaning}"
        rows.append((f"`{name}`", meaning, advice, ", ".join(f"`{each}`" for each in parents)))
    return ("error", "when", "what to do", "is also a"), rows


def variables() -> Table:
    """Return the table of the environment variables."""
    return ("variable", "meaning"), [(f"`{name}`", text) for name, text in VARIABLES.items()]


def servers() -> Table:
    """Return the table of the calls and features that servers of several versions have."""
    kinds = {
        "hosted, 0.38": Dialect(version=(0, 38), protobuf=True, forward_only=True, vendor=True),
        "hosted, 0.36": Dialect(version=(0, 36), protobuf=True, forward_only=True, vendor=True),
        "of 0.28": Dialect(version=(0, 28), protobuf=True, forward_only=True),
        "of 0.22": Dialect(version=(0, 22), protobuf=True, forward_only=True),
        "open, JSON only": Dialect.forced("json"),
    }
    rows = [
        ("bodies of passes", *("protobuf" if one.protobuf else "JSON" for one in kinds.values())),
        ("a call that comes twice is done once", *(_mark(one.keeps_numbers) for one in kinds.values())),
    ]
    rows += [(_plain(name), *(_mark(one.knows(name)) for one in kinds.values())) for name in FEATURES]
    calls = sorted({*_SINCE, *_UNTIL})
    rows += [(f"`{name}`", *(_mark(one.offers(name)) for one in kinds.values())) for name in calls]
    return ("what", *kinds), rows


def _plain(feature: str) -> str:
    return f"`{feature}`" if "_" in feature else feature


def _mark(offered: bool) -> str:
    return "yes" if offered else "no"


def migration() -> Table:
    """Return the table of the changes for scripts of the reference client."""
    return ("with tinker 0.36 or 0.38", "here", "note"), [tuple(row) for row in MIGRATION]
