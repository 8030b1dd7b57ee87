"""`checkpoint`: publish, keep and delete; deletion asks first."""

from __future__ import annotations

import pytest
from support.cli_runs import Run
from support.cli_world import EXPORT, OTHER_RUN, PATH, RUN, World


def left(world: World) -> list[str]:
    return [each["tinker_path"] for each in world.checkpoints]


@pytest.mark.parametrize(
    ("line", "method", "end", "body"),
    [
        (("publish", PATH), "POST", "publish", None),
        (("unpublish", PATH), "DELETE", "publish", None),
        (("set-ttl", PATH, "--ttl", "86400"), "PUT", "ttl", {"ttl_seconds": 86400}),
        (("set-ttl", PATH, "--remove"), "PUT", "ttl", {"ttl_seconds": None}),
    ],
)
def test_changes_print_a_message_on_stderr_only(
    run: Run, world: World, line: tuple[str, ...], method: str, end: str, body: object
) -> None:
    done = run("checkpoint", *line)
    assert (done.code, done.out) == (0, "")
    assert PATH in done.err
    asked = world.log[-1]
    assert (asked.method, asked.path.rpartition("/")[2]) == (method, end)
    assert body is None or asked.json() == body
    assert run("checkpoint", *line, "--quiet").err == ""


def test_delete_lists_the_checkpoints_and_asks(run: Run, world: World) -> None:
    before = left(world)
    for answer in ("n\n", "\n", "maybe\n"):
        done = run("checkpoint", "delete", PATH, EXPORT, stdin=answer)
        assert (done.code, done.out) == (0, "")
        assert f"To be deleted permanently: 2 checkpoints\n  {PATH}\n  {EXPORT}\n" in done.err
        assert "Nothing was deleted." in done.err
    unanswered = run("checkpoint", "delete", PATH, stdin="")
    assert unanswered.code == 1
    assert "Give --yes" in unanswered.err
    assert left(world) == before
    done = run("checkpoint", "delete", PATH, EXPORT, stdin="y\n")
    assert done.code == 0
    assert "2 checkpoints deleted" in done.err
    assert set(before) - set(left(world)) == {PATH, EXPORT}


def test_delete_lists_each_failure(run: Run, world: World) -> None:
    world.undeletable = {PATH: 409}
    missing = f"tinker://{RUN}/weights/none"
    done = run("checkpoint", "delete", "-y", PATH, missing, EXPORT)
    assert done.code == 3
    assert "1 checkpoint deleted" in done.err
    assert f"not deleted: {PATH}: 409" in done.err
    assert f"not deleted: {missing}: 404" in done.err
    assert "2 checkpoints of 3 could not be deleted" in done.err
    again = run("checkpoint", "delete", "-y", PATH, "--format", "json")
    assert again.code == 3
    assert again.json["deleted_count"] == 0
    assert [each["tinker_path"] for each in again.json["failed"]] == [PATH]


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        ((), ["weights/step-0100", "sampler_weights/step-0100", "external_weights/export"]),
        (("--type", "sampler"), ["sampler_weights/step-0100"]),
        (("--type", "weights"), ["weights/step-0100"]),
        (("--before", "2026-03-01"), ["sampler_weights/step-0100"]),
        (("--after", "2026-03-01T10:00:00Z"), ["external_weights/export"]),
        (("--after", "2026-02-27", "--before", "2026-03-01T12:00:00+02:00"), ["sampler_weights/step-0100"]),
    ],
)
def test_delete_of_matching_ones(run: Run, world: World, options: tuple[str, ...], gone: list[str]) -> None:
    done = run("checkpoint", "delete", "--run-id", RUN, *options, stdin="yes\n")
    assert done.code == 0
    assert [path for path in left(world) if path.startswith(f"tinker://{RUN}/")] == [
        f"tinker://{RUN}/{name}"
        for name in ("weights/step-0100", "sampler_weights/step-0100", "external_weights/export")
        if name not in gone
    ]
    assert len(left(world)) == 4 - len(gone)


def test_delete_without_a_match(run: Run, world: World) -> None:
    done = run("checkpoint", "delete", "--run-id", OTHER_RUN, "--type", "sampler", "-f", "json")
    assert (done.code, done.json) == (0, {"deleted_count": 0, "failed": []})
    for more in ((), ("--yes",)):
        done = run("checkpoint", "delete", "--run-id", OTHER_RUN, "--type", "sampler", *more)
        words = f"No checkpoint of run {OTHER_RUN} matches; nothing was deleted."
        assert (done.code, done.out, done.err.splitlines()) == (0, "", [words])


@pytest.mark.parametrize("line", [(), ("--ttl", "60", "--remove"), ("--ttl", "0")])
def test_set_ttl_needs_one_option(run: Run, world: World, line: tuple[str, ...]) -> None:
    assert run("checkpoint", "set-ttl", PATH, *line).code == 2
    assert world.log == []


@pytest.mark.parametrize(
    "line",
    [
        (),
        (PATH, "--run-id", RUN),
        (PATH, "--type", "weights"),
        ("--run-id", RUN, "--type", "heavy"),
        ("--run-id", RUN, "--before", "tomorrow"),
    ],
)
def test_contradictory_options_of_delete(run: Run, world: World, line: tuple[str, ...]) -> None:
    assert run("checkpoint", "delete", *line).code == 2
    assert world.log == []
