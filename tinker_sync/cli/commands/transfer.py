"""`tinker-sync checkpoint download` and `push-hf`: the files of a checkpoint, here or on the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tinker_sync.cli.commands.checkpoint import check_paths
from tinker_sync.cli.failures import CliError
from tinker_sync.cli.formatting import format_flag, format_size
from tinker_sync.cli.framework import Cli, command

if TYPE_CHECKING:
    from tinker_sync.clients.rest import RestClient
    from tinker_sync.transfer.download import CheckpointDownload
    from tinker_sync.transfer.progress import TransferProgress


@command(
    "download",
    example="tinker-sync checkpoint download tinker://RUN/weights/NAME --output models",
)
@click.argument("checkpoint_path", callback=check_paths)
@click.option("-o", "--output", metavar="DIR", help="The directory to put it in; default: here.")
@click.option("--force", is_flag=True, help="Replace an existing directory.")
def download(cli: Cli, checkpoint_path: str, output: str | None, force: bool) -> None:
    """Fetch the files of a checkpoint into a directory named after it.

    The server exports a training checkpoint first. An interrupted download leaves a directory that ends in
    .partial; the same command continues from there.
    """
    from tinker_sync.cli.table import record
    from tinker_sync.transfer.download import default_target

    target = (Path(output) if output else Path.cwd()) / default_target(checkpoint_path).name
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
    """Fetch a checkpoint with a progress bar."""
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


@command(
    "push-hf",
    example="tinker-sync checkpoint push-hf tinker://RUN/weights/NAME --repo NAME/my-adapter",
)
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
    "--ignore-pattern", "ignore", multiple=True, metavar="GLOB", help="Upload no matching files; repeatable."
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

    It needs huggingface_hub and a login there: hf auth login.
    """
    import tempfile

    from tinker_sync.cli import hub
    from tinker_sync.cli.table import record

    if create_pr and revision not in (None, "main"):
        raise click.UsageError(
            "give either --revision or --create-pr: the hub opens pull requests to main only"
        )
    api = hub.connect()
    with tempfile.TemporaryDirectory() as place, cli.rest() as rest:
        folder = Path(place) / "adapter"
        fetch(cli, rest, checkpoint_path, folder)
        about = hub.describe(rest, checkpoint_path)
        hub.check_adapter(folder)
        hub.name_base_model(folder, about)
        wanted = hub.choose_target(about, repo_id, revision, create_pr=create_pr)
        target = hub.make_repository(api, wanted, private=not public)
        if not no_model_card:
            hub.write_card(folder, about, target)
        hub.upload(
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
