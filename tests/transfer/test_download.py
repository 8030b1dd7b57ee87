"""Downloads that get there, over lines and from servers that do their worst; and those that must not."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from support.file_server import Content, FileServer, Tar
from support.tars import member, write

import tinker_sync
from tinker_sync import errors
from tinker_sync.clients.rest import RestClient
from tinker_sync.transfer import file as transfer_file
from tinker_sync.transfer import tries
from tinker_sync.transfer.download import CheckpointDownload, DownloadedFile
from tinker_sync.transfer.progress import TransferProgress

EXTERNAL = "tinker://run/external_weights/final"
SAMPLER = "tinker://run/sampler_weights/final"
KEY = "tml-never-to-a-file-server"
MIB = 1 << 20


@contextmanager
def client_of(server: FileServer, **options: Any) -> Iterator[RestClient]:
    with tinker_sync.ServiceClient(base_url=server.url, api_key=KEY, **options) as service:
        yield RestClient(service.holder)


def fetch(server: FileServer, to: Path, path: str = EXTERNAL, **options: Any) -> CheckpointDownload:
    with client_of(server) as rest:
        return rest.download_checkpoint(path, to, **options).result(60)


def files_below(place: Path) -> dict[str, bytes]:
    return {p.relative_to(place).as_posix(): p.read_bytes() for p in place.rglob("*") if p.is_file()}


@pytest.fixture(autouse=True)
def _small_parts_and_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_file, "PART_BYTES", MIB)
    monkeypatch.setattr(tries, "delay_s", lambda *_, **__: 0.001)


# ------------------------------------------------------------------------------------------- what arrives


def test_all_files_arrive(tmp_path: Path) -> None:
    with FileServer({"adapter_model.safetensors": 5 * MIB + 7, "deep/config.json": 12, "empty": 0}) as server:
        got = fetch(server, tmp_path / "out")
        expected = {name: content.read() for name, content in server.files.items()}
        assert files_below(tmp_path / "out") == expected
    assert got.path == tmp_path / "out"
    assert [(file.name, file.size_bytes) for file in got.files] == [
        ("adapter_model.safetensors", 5 * MIB + 7),
        ("deep/config.json", 12),
        ("empty", 0),
    ]
    assert (got.size_bytes, got.bytes_resumed, got.interruptions) == (5 * MIB + 19, 0, 0)
    assert os.listdir(tmp_path) == ["out"]
    assert server.sent == got.size_bytes


def test_parts_come_side_by_side(tmp_path: Path) -> None:
    barrier = threading.Barrier(3)  # the first part comes alone

    def wait(asked: Any) -> None:
        if asked.headers["range"] != f"bytes=0-{MIB - 1}":
            barrier.wait(20)

    with FileServer({"a": 4 * MIB}, before=wait) as server:
        fetch(server, tmp_path / "out", parts=4)
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()


def test_without_a_name_it_goes_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with FileServer({"a": 5}) as server, client_of(server) as rest:
        got = rest.download_checkpoint(EXTERNAL).result(20)
    assert got.path == tmp_path / "run_external_weights_final"
    assert got.path.is_dir()


def test_progress_is_told_in_plain_values_on_a_worker(tmp_path: Path) -> None:
    told: list[tuple[str, TransferProgress]] = []
    done = threading.Event()

    def listen(state: TransferProgress) -> None:
        told.append((threading.current_thread().name, state))
        if state.stage == "done":
            done.set()
        raise RuntimeError("a listener's own trouble")

    with FileServer({"a": 3 * MIB, "b": 5}, checksums=("x-checksum-sha256",)) as server:
        fetch(server, tmp_path / "out", progress=listen)
        assert done.wait(10)
    names, states = zip(*told, strict=True)
    assert all(name.startswith("tinker-callback") for name in names)
    assert states[0].stage == "preparing"
    last = states[-1]
    assert (last.bytes_done, last.bytes_total, last.files_done, last.files_total) == (3 * MIB + 5,) * 2 + (
        2,
        2,
    )
    done_bytes = [state.bytes_done for state in states]
    assert done_bytes == sorted(done_bytes)


# ------------------------------------------------------------------------------------------- secrets


def test_nothing_of_the_user_goes_to_the_host_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hunter2\n")
    session = requests.Session()
    session.headers["X-Mine"] = "mine-alone"
    session.auth = ("me", "hunter2")
    session.cookies.set("token", "cookie-alone")
    with (
        FileServer({"a": 5}, redirect="") as server,
        client_of(server, session=session, default_headers={"X-Team": "team-alone"}) as rest,
    ):
        rest.download_checkpoint(EXTERNAL, tmp_path / "out").result(20)
    session.close()
    for asked in server.asked():
        assert {name.lower() for name in asked.headers} <= {
            *("host", "user-agent", "accept-encoding", "range", "if-range", "connection", "accept")
        }
    assert len(server.asked()) == 2
    api = [str(asked.headers) for asked in server.seen if asked not in server.asked()]
    assert all(KEY in head and "team-alone" in head for head in api)


def test_addresses_are_in_no_error(tmp_path: Path) -> None:
    with FileServer({"a": 5}, refusal=403) as server:
        server.life_s = -5
        with pytest.raises(errors.TransferError) as caught:
            fetch(server, tmp_path / "out")
        assert "s3cr3t" not in str(caught.value) + repr(caught.value.__context__) + repr(
            caught.value.__cause__
        )
        server.life_s, server.statuses = 60, [418]
        with pytest.raises(errors.TransferError, match="418"):
            fetch(server, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_unprotected_addresses_are_refused(tmp_path: Path) -> None:
    settings = tinker_sync.config.Settings.resolve(base_url="https://service.invalid", api_key="tml-a")
    from tinker_sync.transfer.signed import SignedHttp

    http = SignedHttp(settings)
    for url in ("http://files.invalid/a?signature=s3cr3t", "ftp://files.invalid/a", "file:///etc/passwd"):
        with pytest.raises(errors.TransferError) as caught:
            http.get(url, {})
        assert "s3cr3t" not in str(caught.value)
    http.close()


# ------------------------------------------------------------------------------------------- bad lines


def test_a_line_that_is_cut_again_and_again(tmp_path: Path) -> None:
    with FileServer({"a": 6 * MIB}, cut=300_000, checksums=("x-checksum-sha256",)) as server:
        got = fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()
    assert got.interruptions >= 10
    assert got.files[0].checked == "sha256"


@pytest.mark.parametrize("refusal", [400, 401, 403, 404, 410])
def test_addresses_that_wear_out(tmp_path: Path, refusal: int) -> None:
    with FileServer({"a": 6 * MIB, "b": 9}, uses=2, refusal=refusal) as server:
        got = fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()
    assert server.signed >= 6
    assert got.interruptions >= 2


def test_addresses_are_renewed_before_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_sync.transfer.signed._MARGIN_S", 0.0)
    with FileServer({"a": 5, "b": 5, "c": 5}, life_s=-1.0, before=lambda _: None) as server:
        server.is_good = lambda _: True  # type: ignore[method-assign]  # our clock is wrong, not the server's
        got = fetch(server, tmp_path / "out")
    assert got.interruptions == 0
    assert server.signed == 3 * 4


def test_a_wrong_clock_costs_no_more_than_that(tmp_path: Path) -> None:
    """What has just been signed is used, however old our clock says it is."""
    with FileServer({"a": 5, "b": 5, "c": 5}, life_s=-1000.0) as server:
        server.is_good = lambda _: True  # type: ignore[method-assign]
        assert fetch(server, tmp_path / "out").interruptions == 0
    assert server.signed == 3


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_server_that_asks_for_patience_gets_it(tmp_path: Path, status: int) -> None:
    with FileServer({"a": 3 * MIB}, statuses=[status]) as server:
        got = fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()
    assert got.interruptions == 1


def test_a_server_that_refuses_for_good(tmp_path: Path) -> None:
    with FileServer({"a": 5}, life_s=-5) as server, pytest.raises(errors.TransferError, match="403"):
        fetch(server, tmp_path / "out")
    assert len(server.asked()) == 4


def test_redirects_are_followed_a_while(tmp_path: Path) -> None:
    with FileServer({"a": 5}, redirect="") as server:
        fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()
        server.before = lambda _: setattr(server, "redirect", "")
        with pytest.raises(errors.TransferError, match="redirects more than"):
            fetch(server, tmp_path / "two")


# ------------------------------------------------------------------------------------------- going on


def stopped_halfway(server: FileServer, to: Path, after: int = 3) -> None:
    """Begin a download and give it up after some parts."""
    seen, halted = threading.Semaphore(0), threading.Event()
    count = iter(range(1000))

    def before(_: Any) -> None:
        if next(count) >= after:
            seen.release()
            halted.wait(20)

    server.before = before
    with client_of(server) as rest:
        future = rest.download_checkpoint(EXTERNAL, to, parts=1)
        assert seen.acquire(timeout=20)
        assert future.cancel()
        halted.set()
        with pytest.raises(CancelledError):
            future.result(5)
        await_quiet()
    server.before = lambda _: None
    server.sent = 0


def await_quiet() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("tinker-transfer"):
            thread.join(20)


def test_a_download_that_was_given_up_goes_on(tmp_path: Path) -> None:
    with FileServer({"a": 6 * MIB, "b": 5}) as server:
        stopped_halfway(server, tmp_path / "out")
        assert os.listdir(tmp_path) == ["out.partial"]
        got = fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()
    assert got.bytes_resumed >= 3 * MIB
    assert server.sent <= 3 * MIB + 5
    assert os.listdir(tmp_path) == ["out"]


def test_closing_the_client_stops_a_download(tmp_path: Path) -> None:
    halted = threading.Event()
    with FileServer({"a": 6 * MIB}, before=lambda _: halted.wait(0.05)) as server:
        with client_of(server) as rest:
            future = rest.download_checkpoint(EXTERNAL, tmp_path / "out", parts=1)
            while not server.asked():
                halted.wait(0.005)
        with pytest.raises(errors.ClientClosedError):
            future.result(5)
        await_quiet()
    assert not (tmp_path / "out").exists()


NEW = Content(6 * MIB, seed=7)


@pytest.mark.parametrize(
    "version",
    [
        {"etag": '"v2"'},
        {"etag": 'W/"v2"'},
        {"etag": None, "modified": "Thu, 02 Jan 2026 00:00:00 GMT"},
        {"etag": None},
    ],
    ids=["etag", "weak etag", "date", "nothing"],
)
def test_two_versions_are_never_put_together(tmp_path: Path, version: dict[str, Any]) -> None:
    with FileServer({"a": 6 * MIB}, **version) as server:
        if server.etag:
            server.etag = server.etag.replace("v2", "v1")
        if server.modified:
            server.modified = "Thu, 01 Jan 2026 00:00:00 GMT"
        stopped_halfway(server, tmp_path / "out")
        server.files["a"] = NEW
        server.etag, server.modified = version.get("etag", '"v1"'), version.get("modified")
        before = len(server.asked())
        fetch(server, tmp_path / "out")
    assert (tmp_path / "out" / "a").read_bytes() == NEW.read()
    # Who names a version that can be relied on is asked for that alone.
    asked = server.asked()[before].headers["if-range"]
    assert asked == {'"v2"': '"v1"', None: "Thu, 01 Jan 2026 00:00:00 GMT"}.get(version["etag"]) or not asked
    assert bool(asked) == (version["etag"] == '"v2"' or "modified" in version)


def test_what_stays_the_same_is_not_fetched_again_where_nothing_names_it(tmp_path: Path) -> None:
    with FileServer({"a": 6 * MIB}, etag=None) as server:
        stopped_halfway(server, tmp_path / "out")
        fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()
    assert server.sent < 4 * MIB


def test_nothing_else_is_fetched_while_what_is_there_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it would be written into a file that is about to begin again, and nobody would wait for it."""
    busy: list[int] = []
    compare = transfer_file.FileDownload._compare_sample

    def watched(file: Any, stretch: Any) -> None:
        compare(file, stretch)
        busy.append(file._helping)

    monkeypatch.setattr(transfer_file.FileDownload, "_compare_sample", watched)
    with FileServer({"a": 6 * MIB}, etag=None) as server:
        stopped_halfway(server, tmp_path / "out")
        # Whoever came too early would still be at it when the comparison is over.
        server.before = lambda seen: None if len(server.asked()) <= first else gate.wait(0.2)
        first, gate = len(server.asked()) + 1, threading.Event()
        fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()
    assert busy == [0]


def test_a_file_that_changes_under_way_begins_again(tmp_path: Path) -> None:
    with FileServer({"a": 6 * MIB}) as server:
        count = iter(range(1000))

        def change(_: Any) -> None:
            if next(count) == 3:
                server.files["a"], server.etag = NEW, '"v2"'

        server.before = change
        fetch(server, tmp_path / "out")
    assert (tmp_path / "out" / "a").read_bytes() == NEW.read()


def test_a_whole_file_of_before_is_not_taken_for_that_of_now(tmp_path: Path) -> None:
    with FileServer({"a": 1000, "b": 6 * MIB}) as server:
        stopped_halfway(server, tmp_path / "out", after=4)
        server.files["a"] = Content(1000, seed=9)
        server.etag = '"v2"'
        fetch(server, tmp_path / "out")
        assert files_below(tmp_path / "out") == {name: file.read() for name, file in server.files.items()}


def test_files_that_are_listed_no_more_are_dropped(tmp_path: Path) -> None:
    with FileServer({"a": 1000, "b": 6 * MIB}) as server:
        stopped_halfway(server, tmp_path / "out", after=4)
        del server.files["a"]
        fetch(server, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["b"]


@pytest.mark.parametrize("damage", ["partial", "journal", "both", "another"])
def test_damaged_remains_are_not_built_upon(tmp_path: Path, damage: str) -> None:
    with FileServer({"a": 6 * MIB}) as server:
        stopped_halfway(server, tmp_path / "out")
        work = tmp_path / "out.partial"
        if damage in ("partial", "both"):
            os.truncate(work / "files" / "a", 5)
        if damage in ("journal", "both"):
            (work / "journals" / "a.json").write_text('{"version": 1, "have": [[5')
        if damage == "another":
            (work / "download.json").write_text('{"tinker_path": "tinker://other/weights/a"}')
        got = fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()
    assert got.bytes_resumed == 0


# ------------------------------------------------------------------------------------------- odd servers


@pytest.mark.parametrize(
    "behaviour",
    [
        {"ranges": False},
        {"ranges": False, "chunked": True},
        {"ranges": False, "cut": 5 * MIB},
        {"ranges": False, "chunked": True, "cut": 5 * MIB},
    ],
    ids=str,
)
def test_servers_that_know_no_parts(tmp_path: Path, behaviour: dict[str, Any]) -> None:
    with FileServer({"a": 3 * MIB}, **behaviour) as server:
        fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()
    assert len(server.asked()) <= 3


@pytest.mark.parametrize(
    "behaviour",
    [{"ranges": False, "length": False}, {"encoding": "gzip"}, {"statuses": [418]}],
    ids=["no length", "compressed", "a teapot"],
)
def test_servers_that_cannot_be_trusted_with_it(tmp_path: Path, behaviour: dict[str, Any]) -> None:
    with FileServer({"a": 1000}, **behaviour) as server, pytest.raises(errors.TransferError):
        fetch(server, tmp_path / "out")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "header",
    [
        "x-checksum-sha256",
        "x-checksum-md5",
        "x-checksum",
        "digest",
        "repr-digest",
        "x-amz-checksum-sha256",
        "content-md5",
    ],
)
def test_checksums_are_compared(tmp_path: Path, header: str) -> None:
    ranges = header != "content-md5"  # which with parts is that of the part
    with FileServer({"a": 3 * MIB}, checksums=(header,), ranges=ranges) as server:
        got = fetch(server, tmp_path / "out")
        assert got.files[0].checked == ("md5" if "md5" in header else "sha256")
        server.wrong_checksum = True
        with pytest.raises(errors.TransferError):
            fetch(server, tmp_path / "two")
    assert not (tmp_path / "two").exists()


@pytest.mark.parametrize(
    "name", ["../outside", "/outside", "a/../../outside", "..\\outside", "C:outside", "nul", "a\x00b"]
)
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with FileServer({"a": 5, name: 5}) as server, pytest.raises(errors.TransferError, match="the name"):
        fetch(server, tmp_path / "in" / "out")
    assert server.asked() == []
    assert files_below(tmp_path) == {}


def test_names_that_are_one_name_elsewhere_are_refused(tmp_path: Path) -> None:
    with (
        FileServer({"Model": 5, "model": 5}) as server,
        pytest.raises(errors.TransferError, match="there already"),
    ):
        fetch(server, tmp_path / "out")


def test_a_checkpoint_without_files(tmp_path: Path) -> None:
    with FileServer({}) as server, pytest.raises(errors.TransferError, match="no files"):
        fetch(server, tmp_path / "out")
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------- the disk


def test_what_is_there_stays_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with FileServer({"a": 5}) as server:
        with pytest.raises(errors.TransferError, match="exists already"):
            fetch(server, tmp_path / "out")
        assert server.seen == []
        assert files_below(tmp_path) == {"out/mine": b"mine"}
        fetch(server, tmp_path / "out", overwrite=True)
    assert os.listdir(tmp_path / "out") == ["a"]
    assert os.listdir(tmp_path) == ["out"]


def test_a_disk_without_room_is_noticed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=66 * MIB))
    with FileServer({"a": 3 * MIB}) as server, pytest.raises(errors.TransferError, match="are needed"):
        fetch(server, tmp_path / "out")
    assert len(server.asked()) == 1


def test_two_downloads_do_not_share_a_place(tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def before(_: Any) -> None:
        entered.set()
        leave.wait(20)

    with FileServer({"a": 5}, before=before) as server, client_of(server) as rest:
        first = rest.download_checkpoint(EXTERNAL, tmp_path / "out")
        assert entered.wait(20)
        with pytest.raises(errors.TransferError, match="under way"):
            rest.download_checkpoint(EXTERNAL, tmp_path / "out").result(20)
        leave.set()
        first.result(20)
    assert os.listdir(tmp_path) == ["out"]


def test_a_place_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with FileServer({"a": 5}) as server, pytest.raises(errors.TransferError, match="cannot be written"):
        fetch(server, tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("arguments", "options"),
    [(("tinker://run/final",), {}), ((EXTERNAL,), {"parts": 0}), ((EXTERNAL, "/"), {})],
)
def test_what_cannot_be_meant_is_refused_at_once(arguments: tuple[str, ...], options: dict[str, Any]) -> None:
    with FileServer({}) as server, client_of(server) as rest, pytest.raises(errors.InvalidInputError):
        rest.download_checkpoint(*arguments, **options)
    assert server.seen == []


# ------------------------------------------------------------------------------------------- archives


@pytest.mark.parametrize("expires_header", [True, False])
def test_an_archive_is_unpacked(tmp_path: Path, expires_header: bool) -> None:
    tar = Tar(3 * MIB + 5)
    with FileServer({"archive": tar}, cut=MIB, expires_header=expires_header) as server:
        got = fetch(server, tmp_path / "out", SAMPLER)
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == tar.inner.read()
    assert got.files == (DownloadedFile("adapter_model.safetensors", 3 * MIB + 5),)
    assert os.listdir(tmp_path) == ["out"]


def test_an_archive_may_stay_one(tmp_path: Path) -> None:
    tar = Tar(3 * MIB + 5)
    with FileServer({"archive": tar}, encoding="gzip") as server:
        got = fetch(server, tmp_path / "a.tar", SAMPLER, unpack=False)
    assert got.path.read_bytes() == tar.read()
    assert got.files == (DownloadedFile("a.tar", tar.size),)


class Bytes(Content):
    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def pieces(self, begin: int, end: int) -> Iterator[bytes]:
        yield self.data[begin:end]


@pytest.mark.parametrize(
    ("bad", "error"),
    [(member("../outside", b"x"), errors.UnsafeArchiveError), (b"?" * 512, errors.TransferError)],
)
def test_a_hostile_archive_leaves_nothing(tmp_path: Path, bad: bytes, error: type[Exception]) -> None:
    data = write(tmp_path / "made", bad).read_bytes()
    (tmp_path / "made").unlink()
    with FileServer({"archive": Bytes(data)}) as server, pytest.raises(error):
        fetch(server, tmp_path / "in" / "out", SAMPLER)
    assert not (tmp_path / "outside").exists()
    assert not (tmp_path / "in" / "out").exists()


def test_open_servers_know_checkpoints_by_their_bare_name(tmp_path: Path) -> None:
    asked: list[str] = []

    class Open(FileServer):
        @property
        def archive(self) -> bool:
            path = [seen.path for seen in self.seen][-1]
            asked.append(path)
            return "sampler_weights" not in path

        @archive.setter
        def archive(self, _: bool) -> None: ...

    with Open(
        {"archive": Tar(5)}, config={"pjwt_auth_enabled": False, "proto_write_fwdbwd": False}
    ) as server:
        fetch(server, tmp_path / "out", SAMPLER)
    assert [path.rpartition("/checkpoints/")[2] for path in asked] == [
        "sampler_weights/final/archive",
        "final/archive",
    ]


def test_servers_without_archives_are_said_to_be(tmp_path: Path) -> None:
    with FileServer({}, archive=False) as server:
        with pytest.raises(errors.UnsupportedByServerError, match="save_weights_external"):
            fetch(server, tmp_path / "out", SAMPLER)
        server.config = {"proto_write_fwdbwd": False}
        with pytest.raises(errors.NotFoundError):
            fetch(server, tmp_path / "out", SAMPLER)
    assert os.listdir(tmp_path) == []


def test_checksums_of_python_agree() -> None:
    assert Content(100_000).sum("sha256") == hashlib.sha256(Content(100_000).read()).digest()
