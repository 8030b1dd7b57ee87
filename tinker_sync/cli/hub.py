"""A checkpoint as a repository of the Hugging Face hub: what is written into it, and how it is uploaded."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from tinker_sync._secret import mask_text
from tinker_sync.cli.failures import CliError
from tinker_sync.types import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from tinker_sync.clients.rest import RestClient
    from tinker_sync.types import WeightsInfoResponse

CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
# A mark of the service that an export is whole.
_MARK: Final = "checkpoint_complete"


@frozen
class About:
    """What is known of a checkpoint."""

    path: str
    parsed: ParsedCheckpointTinkerPath
    info: WeightsInfoResponse | None

    @property
    def base_model(self) -> str | None:
        """What it is an adapter of, where the server says so."""
        return self.info.base_model if self.info else None


@frozen
class Target:
    """Where it goes.

    >>> Target("ada/adapter").revision is None
    True
    """

    repo_id: str
    revision: str | None = None


def connected() -> Any:
    """The hub, for somebody who is logged in there.

    Raises:
        CliError: that is not so or cannot be known, or what is needed for it is not installed.
    """
    try:
        library = importlib.import_module("huggingface_hub")  # tokenizers brings it
    except ImportError as error:
        raise CliError("huggingface_hub is not installed", "pip install huggingface_hub") from error
    api = library.HfApi()
    try:
        api.whoami()
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if library.get_token() is None or status in (401, 403):
            raise CliError(
                f"you are not logged in to the hub: {_said(error)}", "Run hf auth login."
            ) from error
        raise CliError(
            f"the hub does not say who you are: {_said(error)}",
            "Look at your network, at any proxy, and at HF_ENDPOINT and HF_HUB_OFFLINE.",
        ) from error
    return api


def about(rest: RestClient, path: str) -> About:
    """What the server knows of a checkpoint; not every one says."""
    from tinker_sync.errors import TinkerError

    info = None
    with suppress(TinkerError):
        info = rest.get_weights_info_by_tinker_path(path).result()
    return About(path, ParsedCheckpointTinkerPath.from_tinker_path(path), info)


def refuse_no_adapter(folder: Path) -> None:
    """Refuse what others could not load.

    Raises:
        CliError: there is no adapter in it.
    """
    if not (folder / CONFIG).exists() or not any((folder / name).exists() for name in _WEIGHTS):
        raise CliError(
            "the checkpoint holds no PEFT adapter",
            f"Expected {CONFIG} and {_WEIGHTS[0]}. Encrypted exports cannot be uploaded.",
        )


def name_base_model(folder: Path, about: About) -> None:
    """Have the adapter say what it belongs to, where it does not."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CliError(f"{CONFIG} of the checkpoint is not JSON: {error}") from error
    if about.base_model and not isinstance(config.get("base_model_name_or_path"), str):
        config["base_model_name_or_path"] = about.base_model
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def target_of(about: About, repo_id: str | None, revision: str | None, *, create_pr: bool) -> Target:
    """Where the user says; else a repository for the model and run, and a branch for the checkpoint.

    The hub opens pull requests to main alone, so then there is no branch.
    """
    if repo_id is not None:
        return Target(repo_id, revision)
    short = (about.base_model or "adapter").rpartition("/")[2]
    name = fit_for_hub(f"tinker-{short}-{about.parsed.training_run_id}")
    if create_pr:
        return Target(name, revision)
    return Target(name, revision or fit_for_hub(about.parsed.checkpoint_id))


def fit_for_hub(text: str) -> str:
    """A name as the hub takes it.

    >>> fit_for_hub("tinker-Qwen3 8B-run:train:0")
    'tinker-Qwen3-8B-run-train-0'
    """
    kept = "".join(each if each.isalnum() or each in "-_." else "-" for each in text)
    return re.sub("-{2,}", "-", kept).strip("-_. ")


def make_repository(api: Any, target: Target, *, private: bool) -> Target:
    """Make the repository if need be; give where it is, with the name of its owner.

    Raises:
        CliError: the hub refuses.
    """
    with _asking():
        made = api.create_repo(repo_id=target.repo_id, private=private, exist_ok=True)
        return Target(made.repo_id, target.revision)


def write_card(folder: Path, about: About, target: Target) -> None:
    """Describe the adapter in a README.md, unless there is one."""
    path = folder / "README.md"
    if not path.exists():
        path.write_text(card(about, target), encoding="utf-8")


def card(about: About, target: Target) -> str:
    """What a README.md says of an adapter."""
    base, info = about.base_model, about.info
    tags = ["tinker", "peft", "lora", *([f"base_model:adapter:{base}"] if base else [])]
    head = [
        *([f"base_model: {base}"] if base else []),
        "library_name: peft",
        "tags:",
        *(f"- {tag}" for tag in tags),
        f"tinker_path: {about.path}",
    ]
    facts = [f"- Checkpoint: `{about.path}`", *([f"- Base model: {base}"] if base else [])]
    if info is not None and info.lora_rank is not None:
        facts.append(f"- LoRA rank: {info.lora_rank}")
    place = f'"{target.repo_id}"' + (f', revision="{target.revision}"' if target.revision else "")
    loading = [
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f'base = AutoModelForCausalLM.from_pretrained("{base or "BASE_MODEL"}", device_map="auto")',
        f"model = PeftModel.from_pretrained(base, {place})",
        "```",
    ]
    body = ["# LoRA adapter", "", *facts, "", "## Loading it", "", *loading, ""]
    return "\n".join(["---", *head, "---", "", *body])


def upload(
    api: Any,
    folder: Path,
    about: About,
    target: Target,
    *,
    commit_message: str | None,
    create_pr: bool,
    allow: Sequence[str],
    ignore: Sequence[str],
) -> None:
    """Upload the files, to a branch that is made if need be.

    Raises:
        CliError: another checkpoint is there, or the hub refuses.
    """
    other = _checkpoint_in(api, target)
    if other is not None and other != about.path:
        raise CliError(
            f"{target.repo_id} holds another checkpoint, {other}", "Give another --repo or --revision."
        )
    with _asking():
        # What is there already may be no branch, but a pull request; a new branch begins as main.
        if target.revision is not None and not api.revision_exists(target.repo_id, target.revision):
            api.create_branch(target.repo_id, branch=target.revision, exist_ok=True)
        api.upload_folder(
            folder_path=str(folder),
            repo_id=target.repo_id,
            path_in_repo="",
            revision=target.revision,
            commit_message=commit_message,
            create_pr=create_pr,
            allow_patterns=list(allow) or None,
            ignore_patterns=(list(ignore) or None) if allow else [*ignore, _MARK],
        )


@contextmanager
def _asking() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CliError(f"the hub does not take it: {_said(error)}") from error


def _said(error: Exception) -> str:
    """What the library of the hub says, in a line; addresses lose their queries, which hold signatures."""
    text = " ".join(str(error).split())
    return mask_text(re.sub(r"(?<=\S)\?\S+", "", text)) or type(error).__name__


def _checkpoint_in(api: Any, target: Target) -> str | None:
    """The checkpoint that a repository says it holds."""
    try:
        path = api.hf_hub_download(repo_id=target.repo_id, filename="README.md", revision=target.revision)
        text = Path(path).read_text(encoding="utf-8", errors="ignore")
    except Exception:  # noqa: BLE001  # most repositories have none, and each kind of hub says so differently
        return None
    found = re.search(r"tinker://[^\s`]+", text)
    return found.group() if found else None
