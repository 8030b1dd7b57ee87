"""`tinker-sync checkpoint download` and `push-hf`: checkpoints as files, here or on the Hugging Face hub.

The package huggingface_hub loads when a command calls `connect`.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from tinker_sync.cli.commands.checkpoint import check_paths, parse_path
from tinker_sync.cli.failures import CliError
from tinker_sync.cli.formatting import format_flag, format_size
from tinker_sync.cli.framework import Cli, command

if TYPE_CHECKING:
    from tinker_sync.clients.rest import RestClient
    from tinker_sync.transport.files.download import CheckpointDownload
    from tinker_sync.transport.files.progress import TransferProgress
    from tinker_sync.types import ParsedCheckpointTinkerPath, WeightsInfoResponse

CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
# The service writes this file last, as a mark of a complete export.
_MARK: Final = "checkpoint_complete"


class CheckpointFacts(NamedTuple):
    """The path of a checkpoint, and the details that the server has returned, if any."""

    path: str
    parsed: ParsedCheckpointTinkerPath
    info: WeightsInfoResponse | None

    @property
    def base_model(self) -> str | None:
        """The name of the base model, or None if the server has not returned it."""
        return self.info.base_model if self.info else None


class HubTarget(NamedTuple):
    """A repository of the hub and one of its branches. A `revision` of None is the main branch.

    >>> HubTarget("ada/adapter").revision is None
    True
    """

    repo_id: str
    revision: str | None = None


def connect() -> Any:
    """Return the API object of the hub for the logged-in user.

    Raises:
        CliError: huggingface_hub is missing, no user is logged in, or the hub cannot be reached.
    """
    try:
        library = importlib.import_module("huggingface_hub")  # installed as a dependency of tokenizers
    except ImportError as error:
        raise CliError("huggingface_hub is not installed", "pip install huggingface_hub") from error
    api = library.HfApi()
    try:
        api.whoami()
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if library.get_token() is None or status in (401, 403):
            raise CliError(
                f"you are not logged in to the hub: {_summarize(error)}", "Run hf auth login."
            ) from error
        raise CliError(
            f"the hub did not confirm your login: {_summarize(error)}",
            "Check your network, your proxy, and the variables HF_ENDPOINT and HF_HUB_OFFLINE.",
        ) from error
    return api


def describe(rest: RestClient, path: str) -> CheckpointFacts:
    """Return the path of a checkpoint, and its details unless the request for them fails."""
    from tinker_sync.errors import TinkerError

    info = None
    with suppress(TinkerError):
        info = rest.get_weights_info_by_tinker_path(path).result()
    return CheckpointFacts(path, parse_path(path, rest.holder.settings.base_url), info)


def check_adapter(folder: Path) -> None:
    """Check that a folder holds a PEFT adapter.

    Raises:
        CliError: the folder has no adapter.
    """
    if not (folder / CONFIG).exists() or not any((folder / name).exists() for name in _WEIGHTS):
        raise CliError(
            "the checkpoint holds no PEFT adapter",
            f"Expected {CONFIG} and {_WEIGHTS[0]}. Encrypted exports cannot be uploaded.",
        )


def name_base_model(folder: Path, about: CheckpointFacts) -> None:
    """Write the name of the base model, if it is known, into the adapter's configuration.

    A name that the file has already stays.

    Raises:
        CliError: the file is not JSON.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CliError(f"{CONFIG} of the checkpoint is not JSON: {error}") from error
    if about.base_model and not isinstance(config.get("base_model_name_or_path"), str):
        config["base_model_name_or_path"] = about.base_model
        path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def choose_target(
    about: CheckpointFacts, repo_id: str | None, revision: str | None, *, create_pr: bool
) -> HubTarget:
    """Return the repository and the branch of an upload.

    With `repo_id`, return both as given. Without it, name the repository after the model and the run. Then
    also name the branch after the checkpoint, unless `revision` is given, or `create_pr` is True: the hub
    opens pull requests to main only.
    """
    if repo_id is not None:
        return HubTarget(repo_id, revision)
    short = (about.base_model or "adapter").rpartition("/")[2]
    name = make_hub_name(f"tinker-{short}-{about.parsed.training_run_id}")
    if create_pr:
        return HubTarget(name, revision)
    return HubTarget(name, revision or make_hub_name(about.parsed.checkpoint_id))


def make_hub_name(text: str) -> str:
    """Return a text as a name that the hub accepts.

    >>> make_hub_name("tinker-Qwen3 8B-run:train:0")
    'tinker-Qwen3-8B-run-train-0'
    """
    kept = "".join(each if each.isalnum() or each in "-_." else "-" for each in text)
    return re.sub("-{2,}", "-", kept).strip("-_. ")


def make_repository(api: Any, target: HubTarget, *, private: bool) -> HubTarget:
    """Create the repository if it is missing; return the target, with the owner's name in `repo_id`.

    Raises:
        CliError: the hub refuses to create it.
    """
    with _translate_errors():
        made = api.create_repo(repo_id=target.repo_id, private=private, exist_ok=True)
        return HubTarget(made.repo_id, target.revision)


def write_card(folder: Path, about: CheckpointFacts, target: HubTarget) -> None:
    """Write a README.md for the adapter, unless the folder has one."""
    path = folder / "README.md"
    if not path.exists():
        path.write_text(make_card(about, target), encoding="utf-8")


def make_card(about: CheckpointFacts, target: HubTarget) -> str:
    """Return the text of a README.md for an adapter."""
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
    about: CheckpointFacts,
    target: HubTarget,
    *,
    commit_message: str | None,
    create_pr: bool,
    allow: Sequence[str],
    ignore: Sequence[str],
) -> None:
    """Upload the files of a folder to the hub, and create the branch if it is missing.

    With `allow`, only files that match one of these patterns are uploaded; files that match `ignore` are not.

    Raises:
        CliError: the README.md on the branch names another checkpoint, or the hub refuses the upload.
    """
    other = _find_checkpoint(api, target)
    if other is not None and other != about.path:
        raise CliError(
            f"{target.repo_id} holds another checkpoint, {other}", "Give another --repo or --revision."
        )
    with _translate_errors():
        # An existing revision may be a pull request. A new branch starts from main.
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
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise CliError(f"the hub refused: {_summarize(error)}") from error


def _summarize(error: Exception) -> str:
    """Return the text of an error in one line, without the queries of URLs, which hold signatures."""
    from tinker_sync._base.secret import mask_text

    text = " ".join(str(error).split())
    return mask_text(re.sub(r"(?<=\S)\?\S+", "", text)) or type(error).__name__


def _find_checkpoint(api: Any, target: HubTarget) -> str | None:
    """Return the checkpoint path that the README.md on the branch of the target contains, or None."""
    try:
        path = api.hf_hub_download(repo_id=target.repo_id, filename="README.md", revision=target.revision)
        text = Path(path).read_text(encoding="utf-8", errors="ignore")
    except Exception:  # noqa: BLE001  # most repositories have none, and each hub reports that differently
        return None
    found = re.search(r"tinker://[^\s`]+", text)
    return found.group() if found else None


@command("download", example="tinker-sync checkpoint download tinker://RUN/weights/NAME --output models")
@click.argument("checkpoint_path", callback=check_paths)
@click.option("-o", "--output", metavar="DIR", help="The directory to put it in; default: here.")
@click.option("--force", is_flag=True, help="Replace an existing directory.")
def download(cli: Cli, checkpoint_path: str, output: str | None, force: bool) -> None:
    """Fetch the files of a checkpoint into a directory named after it.

    A server without archives exports a training checkpoint first. An interrupted download leaves a directory
    that ends in .partial; the same command continues from there.
    """
    from tinker_sync.cli.table import record

    name = parse_path(checkpoint_path, cli.base_url).directory_name
    target = (Path(output) if output else Path.cwd()) / name
    if target.exists() and not force:
        raise CliError(f"{target} exists", "Give --force to replace it, or another --output.")
    with cli.rest() as rest:
        done = fetch(cli, rest, checkpoint_path, target, overwrite=force)
    data: dict[str, Any] = {"checkpoint_path": checkpoint_path, "destination": str(target)}
    if done.size_bytes:
        data["file_size_bytes"] = done.size_bytes
    pairs = [
        ("Checkpoint", checkpoint_path),
        ("Size", format_size(done.size_bytes)),
        ("Saved to", str(target)),
    ]
    if done.bytes_resumed:
        pairs.append(("From before", format_size(done.bytes_resumed)))
    cli.sink.show(data, record("", pairs))


def fetch(
    cli: Cli, rest: RestClient, path: str, target: Path, *, overwrite: bool = False
) -> CheckpointDownload:
    """Fetch the files of a checkpoint into the directory `target`, with a progress bar.

    Ctrl-C cancels the download; the same call later continues it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with cli.sink.progress(f"Fetching {target.name[-30:]}", None, unit="bytes") as bar:

        def show(state: TransferProgress) -> None:
            bar.update(state.bytes_done, state.bytes_total)

        future = rest.download_checkpoint(path, target, overwrite=overwrite, progress=show)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            cli.sink.complain("\ninterrupted; the same command continues from here.")
            raise


@command("push-hf", example="tinker-sync checkpoint push-hf tinker://RUN/weights/NAME --repo NAME/my-adapter")
@click.argument("checkpoint_path", callback=check_paths)
@click.option(
    "-r", "--repo", "repo_id", metavar="REPO", help="The repository; default: named after model and run."
)
@click.option("--public", is_flag=True, help="Make a new repository public.")
@click.option("--revision", metavar="BRANCH", help="The branch to upload to; created if needed.")
@click.option("--commit-message", metavar="TEXT", help="The message of the commit.")
@click.option("--create-pr", is_flag=True, help="Open a pull request to main instead of a commit.")
@click.option(
    "--allow-pattern", "allow", multiple=True, metavar="GLOB", help="Upload only matching files; repeatable."
)
@click.option(
    "--ignore-pattern", "ignore", multiple=True, metavar="GLOB", help="Skip matching files; repeatable."
)
@click.option("--no-model-card", is_flag=True, help="Do not write a README.md.")
def push_hf(
    cli: Cli,
    checkpoint_path: str,
    repo_id: str | None,
    public: bool,
    revision: str | None,
    commit_message: str | None,
    create_pr: bool,
    allow: Sequence[str],
    ignore: Sequence[str],
    no_model_card: bool,
) -> None:
    """Upload a checkpoint to the Hugging Face hub, as a PEFT adapter.

    The command needs huggingface_hub and a login at the hub: hf auth login.
    """
    import tempfile

    from tinker_sync.cli.table import record

    if create_pr and revision not in (None, "main"):
        raise click.UsageError(
            "give either --revision or --create-pr: the hub opens pull requests to main only"
        )
    api = connect()
    with tempfile.TemporaryDirectory() as place, cli.rest() as rest:
        folder = Path(place) / "adapter"
        fetch(cli, rest, checkpoint_path, folder)
        about = describe(rest, checkpoint_path)
        check_adapter(folder)
        name_base_model(folder, about)
        wanted = choose_target(about, repo_id, revision, create_pr=create_pr)
        target = make_repository(api, wanted, private=not public)
        if not no_model_card:
            write_card(folder, about, target)
        upload(
            api,
            folder,
            about,
            target,
            commit_message=commit_message,
            create_pr=create_pr,
            allow=allow,
            ignore=ignore,
        )
    data: dict[str, Any] = {"checkpoint_path": checkpoint_path, "repo_id": target.repo_id}
    if target.revision is not None:
        data["revision"] = target.revision
    data["public"] = public
    pairs = [("Checkpoint", checkpoint_path), ("Repository", target.repo_id)]
    pairs += [("Branch", target.revision)] if target.revision else []
    cli.sink.show(data, record("", [*pairs, ("Public", format_flag(public))]))
