"""Downloads over broken connections and from unusual servers, and downloads that must fail."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from support.clock import FakeClock
from support.crowd import until
from support.file_server import Content, FileServer, Tar
from support.raising import refuse_threads
from support.tars import member, write

import tinker_sync
from tinker_sync import errors
from tinker_sync._base.clock import SystemClock
from tinker_sync._base.secret import HeaderMap
from tinker_sync.clients.rest import RestClient
from tinker_sync.config import Settings
from tinker_sync.runtime.workers import Workers
from tinker_sync.transport.files import file as transfer_file
from tinker_sync.transport.files import response_head
from tinker_sync.transport.files.download import CheckpointDownload, DownloadedFile
from tinker_sync.transport.files.download_state import PartialDirectory
from tinker_sync.transport.files.progress import ProgressReporter, TransferProgress
from tinker_sync.transport.files.response_head import TryAgain, find_checksum, read_head
from tinker_sync.transport.files.signed import Cancellation, SignedHttp, SignedLinks, SignedUrls

EXTERNAL = "tinker://run/external_weights/final"
SAMPLER = "tinker://run/sampler_weights/final"
KEY = "tml-never-to-a-file-server"
PART = 1 << 18


@contextmanager
def client_of(server: FileServer, **options: Any) -> Iterator[RestClient]:
    with tinker_sync.ServiceClient(base_url=server.url, api_key=KEY, **options) as service:
        yield RestClient(service.holder)


def fetch(server: FileServer, to: Path, path: str = EXTERNAL, **options: Any) -> CheckpointDownload:
    with client_of(server) as rest:
        return rest.download_checkpoint(path, to, **options).result(120)


def files_below(place: Path) -> dict[str, bytes]:
    return {p.relative_to(place).as_posix(): p.read_bytes() for p in place.rglob("*") if p.is_file()}


@pytest.fixture(autouse=True)
def _small_parts_and_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_file, "PART_BYTES", PART)
    monkeypatch.setenv("TINKER_PACE", "0.001")


# ------------------------------------------------------------------------------------------- success


def test_all_files_arrive(tmp_path: Path) -> None:
    with FileServer(
        {"adapter_model.safetensors": 5 * PART + 7, "deep/config.json": 12, "empty": 0}
    ) as server:
        got = fetch(server, tmp_path / "out")
        expected = {name: content.read() for name, content in server.files.items()}
        assert files_below(tmp_path / "out") == expected
    assert got.path == tmp_path / "out"
    assert [(file.name, file.size_bytes) for file in got.files] == [
        ("adapter_model.safetensors", 5 * PART + 7),
        ("deep/config.json", 12),
        ("empty", 0),
    ]
    assert (got.size_bytes, got.bytes_resumed, got.interruptions) == (5 * PART + 19, 0, 0)
    assert os.listdir(tmp_path) == ["out"]
    assert server.sent == got.size_bytes


def test_parts_are_fetched_in_parallel(tmp_path: Path) -> None:
    barrier = threading.Barrier(3)  # the other parts start after the first

    def wait(asked: Any) -> None:
        if asked.headers["range"] != f"bytes=0-{PART - 1}":
            barrier.wait(120)

    with FileServer({"a": 4 * PART}, before=wait) as server:
        fetch(server, tmp_path / "out", parts=4)
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()


def test_without_further_threads_one_fetches_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch, "tinker-part")
    with FileServer({"a": 4 * PART}) as server:
        fetch(server, tmp_path / "out", parts=4)
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()


def test_default_target_is_named_after_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with FileServer({"a": 5}) as server, client_of(server) as rest:
        got = rest.download_checkpoint(EXTERNAL).result(120)
    assert got.path == tmp_path / "run_external_weights_final"
    assert got.path.is_dir()


def test_progress_arrives_on_a_worker(tmp_path: Path) -> None:
    reports: list[tuple[str, TransferProgress]] = []
    done = threading.Event()

    def listen(state: TransferProgress) -> None:
        reports.append((threading.current_thread().name, state))
        if state.stage == "done":
            done.set()
        raise RuntimeError("the listener's own error")

    with FileServer({"a": 3 * PART, "b": 5}, checksums=("x-checksum-sha256",)) as server:
        fetch(server, tmp_path / "out", progress=listen)
        assert done.wait(120)
    names, states = zip(*reports, strict=True)
    assert all(name.startswith("tinker-callback") for name in names)
    assert states[0].stage == "preparing"
    last = states[-1]
    assert (last.bytes_done, last.bytes_total) == (3 * PART + 5, 3 * PART + 5)
    assert (last.files_done, last.files_total) == (2, 2)
    done_bytes = [state.bytes_done for state in states]
    assert done_bytes == sorted(done_bytes)


# ------------------------------------------------------------------------------------------- secrets


def test_file_host_gets_no_user_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        rest.download_checkpoint(EXTERNAL, tmp_path / "out").result(120)
    session.close()
    for asked in server.asked():
        assert {name.lower() for name in asked.headers} <= {
            *("host", "user-agent", "accept-encoding", "range", "if-range", "connection", "accept")
        }
    assert len(server.asked()) == 2
    api = [str(asked.headers) for asked in server.seen if asked not in server.asked()]
    assert all(KEY in head and "team-alone" in head for head in api)


def test_errors_hide_addresses(tmp_path: Path) -> None:
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
    http = SignedHttp(Settings.resolve(base_url="https://service.invalid", api_key="tml-a"))
    for url in ("http://files.invalid/a?signature=s3cr3t", "ftp://files.invalid/a", "file:///etc/passwd"):
        with pytest.raises(errors.TransferError) as caught:
            http.get(url, {})
        assert "s3cr3t" not in str(caught.value)
    http.close()


@pytest.mark.parametrize("parts", [0, 65, 2.5, "4", None])
def test_a_wrong_number_of_parts_is_refused(tmp_path: Path, parts: Any) -> None:
    with (
        FileServer({"a": 5}) as server,
        tinker_sync.ServiceClient(base_url=server.url, api_key="tml-a") as service,
        pytest.raises(errors.InvalidInputError, match=f"parts: expected 1 to 64, got {parts!r}"),
    ):
        RestClient(service.holder).download_checkpoint(EXTERNAL, tmp_path / "out", parts=parts)
    assert server.seen == []


@pytest.mark.parametrize("host", [".files", "*", "[::1", "files:99999"])
def test_malformed_addresses_are_refused(host: str) -> None:
    http = SignedHttp(Settings.resolve(base_url="https://service.invalid", api_key="tml-a"))
    with pytest.raises(errors.TransferError, match="gave an address") as caught:
        http.get(f"https://{host}/a?signature=s3cr3t", {})
    assert "s3cr3t" not in str(caught.value)
    assert caught.value.__suppress_context__
    http.close()


def test_a_redirect_to_a_malformed_address_is_refused(tmp_path: Path) -> None:
    with (
        FileServer({"a": 5}, redirect="https://[::1/a?signature=s3cr3t") as server,
        pytest.raises(errors.TransferError, match="redirects") as caught,
    ):
        fetch(server, tmp_path / "out")
    assert "s3cr3t" not in str(caught.value)


# ------------------------------------------------------------------------------------------- interruptions


def test_broken_connections_are_retried(tmp_path: Path) -> None:
    # Older versions of urllib3 lose what they have read of a block, so a connection lasts for more than one.
    with FileServer({"a": 24 * PART}, cut=300_000, checksums=("x-checksum-sha256",)) as server:
        got = fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()
    assert got.interruptions >= 10
    assert got.files[0].checked == "sha256"


@pytest.mark.parametrize("refusal", [400, 401, 403, 404, 410])
def test_refused_addresses_are_renewed(tmp_path: Path, refusal: int) -> None:
    with FileServer({"a": 6 * PART, "b": 9}, uses=2, refusal=refusal) as server:
        got = fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()
    assert server.signed >= 6
    assert got.interruptions >= 2


def test_expired_addresses_are_renewed() -> None:
    clock, numbers = FakeClock(), iter(range(1, 9))

    def sign() -> SignedUrls:
        expires = datetime.fromtimestamp(clock.time() + 60, tz=timezone.utc)
        return SignedUrls({"a": f"http://files.invalid/{next(numbers)}"}, expires)

    links = SignedLinks(sign, clock)
    assert links.get("a") == ("http://files.invalid/1", 1)
    clock.advance(29)
    assert links.get("a")[1] == 1
    clock.advance(2)
    assert links.get("a") == ("http://files.invalid/2", 2)


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_temporary_errors_are_retried(tmp_path: Path, status: int) -> None:
    with FileServer({"a": 3 * PART}, statuses=[status]) as server:
        got = fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()
    assert got.interruptions == 1


def test_redirects_are_followed_up_to_a_limit(tmp_path: Path) -> None:
    with FileServer({"a": 5}, redirect="") as server:
        fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()
        server.before = lambda _: setattr(server, "redirect", "")
        with pytest.raises(errors.TransferError, match="redirects more than"):
            fetch(server, tmp_path / "two")


# ------------------------------------------------------------------------------------------- resuming


def stopped_halfway(server: FileServer, to: Path, after: int = 3) -> None:
    """Begin a download, and cancel it when `after` parts have been requested."""
    seen, halted = threading.Semaphore(0), threading.Event()
    count = iter(range(1000))

    def before(_: Any) -> None:
        if next(count) >= after:
            seen.release()
            halted.wait(120)

    server.before = before
    with client_of(server) as rest:
        future = rest.download_checkpoint(EXTERNAL, to, parts=1)
        assert seen.acquire(timeout=120)
        assert future.cancel()
        halted.set()
        with pytest.raises(CancelledError):
            future.result(120)
        await_quiet()
    server.before = lambda _: None
    server.sent = 0


def await_quiet() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("tinker-transfer"):
            thread.join(120)


def test_cancelled_download_resumes(tmp_path: Path) -> None:
    with FileServer({"a": 6 * PART, "b": 5}) as server:
        stopped_halfway(server, tmp_path / "out")
        assert os.listdir(tmp_path) == ["out.partial"]
        got = fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()
    assert got.bytes_resumed >= 3 * PART
    assert server.sent <= 3 * PART + 5
    assert os.listdir(tmp_path) == ["out"]


def test_closing_the_client_stops_a_download(tmp_path: Path) -> None:
    closed = threading.Event()
    with FileServer({"a": 6 * PART}, before=lambda _: closed.wait(120)) as server:
        with client_of(server) as rest:
            future = rest.download_checkpoint(EXTERNAL, tmp_path / "out", parts=1)
            until(server.asked)
        closed.set()
        with pytest.raises(errors.ClientClosedError):
            future.result(120)
        await_quiet()
    assert not (tmp_path / "out").exists()


NEW = Content(6 * PART, seed=7)


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
def test_versions_never_mix(tmp_path: Path, version: dict[str, Any]) -> None:
    with FileServer({"a": 6 * PART}, **version) as server:
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
    # Only a strong `ETag`, or else a date, goes into If-Range.
    asked = server.asked()[before].headers["if-range"]
    assert asked == {'"v2"': '"v1"', None: "Thu, 01 Jan 2026 00:00:00 GMT"}.get(version["etag"]) or not asked
    assert bool(asked) == (version["etag"] == '"v2"' or "modified" in version)


def test_bytes_that_changed_on_the_disk_are_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends no checksum, so only those of the parts show the change."""
    monkeypatch.setattr(transfer_file, "_RUN_BYTES", PART)
    with FileServer({"a": 8 * PART}) as server:
        stopped_halfway(server, tmp_path / "out", after=6)
        with (tmp_path / "out.partial" / "files" / "a").open("r+b") as file:
            file.seek(PART // 2)
            changed = bytes(octet ^ 1 for octet in file.read(3))
            file.seek(PART // 2)
            file.write(changed)
        got = fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()
    assert 2 * PART <= got.bytes_resumed < 6 * PART
    assert server.sent < 7 * PART


def test_comparison_starts_no_workers(tmp_path: Path) -> None:
    """No worker starts before the comparison has ended, because the download may have to begin again."""
    begun: list[int] = []

    class CountingWorkers(Workers):
        def run(self, job: Any) -> None:
            begun.append(len(server.asked()))
            super().run(job)

    with FileServer({"a": 6 * PART}, etag=None) as server:
        stopped_halfway(server, tmp_path / "out")
        before = len(server.asked())
        settings = Settings.resolve(base_url=server.url, api_key=KEY)
        workers = CountingWorkers("part", 3)
        context = transfer_file.FetchContext(
            links=SignedLinks(lambda: SignedUrls({"a": server.sign("a")}, None), SystemClock()),
            http=SignedHttp(settings),
            run=workers.run,
            parts=4,
            clock=SystemClock(),
            cancellation=Cancellation(),
            reporter=ProgressReporter(
                None, workers.run, SystemClock(), TransferProgress(tinker_path="", stage="done")
            ),
        )
        work = tmp_path / "out.partial"
        place = work / "files" / "a"
        transfer_file.FileDownload("a", place, work / "journals" / "a.json", context).run()
        assert place.read_bytes() == server.files["a"].read()
        assert workers.close(10)
        context.http.close()
    assert begun
    assert min(begun) > before + 1  # the first request is the comparison


def test_changed_file_begins_again(tmp_path: Path) -> None:
    with FileServer({"a": 6 * PART}) as server:
        count = iter(range(1000))

        def change(_: Any) -> None:
            if next(count) == 3:
                server.files["a"], server.etag = NEW, '"v2"'

        server.before = change
        fetch(server, tmp_path / "out")
    assert (tmp_path / "out" / "a").read_bytes() == NEW.read()


def test_complete_file_of_old_version_is_replaced(tmp_path: Path) -> None:
    with FileServer({"a": 1000, "b": 6 * PART}) as server:
        stopped_halfway(server, tmp_path / "out", after=4)
        server.files["a"] = Content(1000, seed=9)
        server.etag = '"v2"'
        fetch(server, tmp_path / "out")
        assert files_below(tmp_path / "out") == {name: file.read() for name, file in server.files.items()}


def test_unlisted_files_are_dropped(tmp_path: Path) -> None:
    with FileServer({"a": 1000, "b": 6 * PART}) as server:
        stopped_halfway(server, tmp_path / "out", after=4)
        del server.files["a"]
        fetch(server, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["b"]


@pytest.mark.parametrize("damage", ["partial", "journal", "both", "another"])
def test_damaged_state_is_discarded(tmp_path: Path, damage: str) -> None:
    with FileServer({"a": 6 * PART}) as server:
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
        {"ranges": False, "cut": 5 * PART},
        {"ranges": False, "chunked": True, "cut": 5 * PART},
    ],
    ids=str,
)
def test_servers_without_ranges(tmp_path: Path, behaviour: dict[str, Any]) -> None:
    with FileServer({"a": 3 * PART}, **behaviour) as server:
        fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()
    assert len(server.asked()) <= 3


@pytest.mark.parametrize(
    "behaviour",
    [{"ranges": False, "length": False}, {"encoding": "gzip"}, {"statuses": [418]}],
    ids=["no length", "compressed", "a teapot"],
)
def test_unusable_answers_fail(tmp_path: Path, behaviour: dict[str, Any]) -> None:
    with FileServer({"a": 1000}, **behaviour) as server, pytest.raises(errors.TransferError):
        fetch(server, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_part_that_begins_elsewhere_is_asked_for_again(tmp_path: Path) -> None:
    asked: list[str] = []

    def shift(handler: Any) -> None:
        asked.append(handler.headers["range"])
        if len(asked) == 1:
            handler.headers.replace_header("range", f"bytes=7-{PART - 1}")

    with FileServer({"a": 3 * PART}, before=shift) as server:
        fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()
    assert asked[:2] == [f"bytes=0-{PART - 1}"] * 2


@pytest.mark.parametrize(
    "header",
    [
        *("x-checksum-sha256", "x-checksum-md5", "x-checksum", "digest", "repr-digest"),
        *("x-amz-checksum-sha256", "content-md5"),
    ],
)
def test_checksums_are_verified(tmp_path: Path, header: str) -> None:
    ranges = header != "content-md5"  # in an answer to a range, this header has the checksum of the part
    with FileServer({"a": 3 * PART}, checksums=(header,), ranges=ranges) as server:
        got = fetch(server, tmp_path / "out")
        assert got.files[0].checked == ("md5" if "md5" in header else "sha256")
        server.wrong_checksum = True
        with pytest.raises(errors.TransferError):
            fetch(server, tmp_path / "two")
    assert not (tmp_path / "two").exists()


def test_a_server_that_sends_parts_with_status_200(tmp_path: Path) -> None:
    """The first part was taken for the whole file."""

    def answer_200(handler: Any) -> None:
        send = type(handler).send_response
        handler.send_response = lambda status: send(handler, 200 if status == 206 else status)

    with FileServer({"a": 3 * PART}, before=answer_200) as server:
        fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()


def test_a_server_that_names_a_part_and_sends_the_whole_file(tmp_path: Path) -> None:
    """Its first bytes were taken for those of each part."""
    with FileServer({"a": 3 * PART}, ranges=False) as server:

        def name_the_part(handler: Any) -> None:
            end, asked = handler.end_headers, handler.headers["Range"].removeprefix("bytes=")

            def end_headers() -> None:
                handler.send_header("Content-Range", f"bytes {asked}/{3 * PART}")
                end()

            handler.end_headers = end_headers

        server.before = name_the_part
        fetch(server, tmp_path / "out")
        assert (tmp_path / "out" / "a").read_bytes() == server.files["a"].read()


@pytest.mark.parametrize("value", ["bytes 5-4/10", "bytes 5-9/9", "bytes 5-9/0"])
def test_a_range_that_cannot_be_is_asked_for_again(value: str) -> None:
    """An empty part was asked for without end, and a size of 0 made an empty file."""
    answer = SimpleNamespace(status=206, headers=HeaderMap({"Content-Range": value}))
    with pytest.raises(response_head.TryAgain, match="after the end"):
        response_head.read_head(answer, 5, 10, 0.0, encoded=False)


@pytest.mark.parametrize("text", ["a" * 60_000, "a=" * 30_000, " " * 60_000, "a " * 30_000])
def test_checksums_are_read_in_linear_time(text: str) -> None:
    """A header of 60 kB stopped all threads of the process for a minute."""
    begin = time.process_time()
    assert response_head.find_checksum(HeaderMap({"Digest": text, "X-Goog-Hash": text}), whole=True) is None
    assert time.process_time() - begin < 2.0


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("X-Goog-Hash", "crc32c=n03x6A==, md5=XUFAKrxLKna5cZ2REBfFkg=="),
        ("Digest", "unixsum=30637,MD5 = XUFAKrxLKna5cZ2REBfFkg=="),
        ("Repr-Digest", "sha-512=:abc:, md5=:XUFAKrxLKna5cZ2REBfFkg==:"),
    ],
)
def test_lists_of_checksums(header: str, value: str) -> None:
    found = response_head.find_checksum(HeaderMap({header: value}), whole=False)
    assert found == ("md5", "5d41402abc4b2a76b9719d911017c592")


@pytest.mark.parametrize(
    "name", ["../outside", "/outside", "a/../../outside", "..\\outside", "C:outside", "nul", "a\x00b"]
)
def test_unsafe_names_are_refused(tmp_path: Path, name: str) -> None:
    with FileServer({"a": 5, name: 5}) as server, pytest.raises(errors.TransferError, match="the name"):
        fetch(server, tmp_path / "in" / "out")
    assert server.asked() == []
    assert files_below(tmp_path) == {}


@pytest.mark.parametrize(
    ("files", "problem"), [({}, "no files"), ({"Model": 5, "model": 5}, "there already")]
)
def test_unusable_lists_of_files_fail(tmp_path: Path, files: dict[str, int], problem: str) -> None:
    with FileServer(files) as server, pytest.raises(errors.TransferError, match=problem):
        fetch(server, tmp_path / "out")
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------- the disk


def test_existing_target_needs_overwrite(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with FileServer({"a": 5}) as server:
        with pytest.raises(errors.TransferError, match=r"exists already.*overwrite=True"):
            fetch(server, tmp_path / "out")
        assert server.seen == []
        assert files_below(tmp_path) == {"out/mine": b"mine"}
        fetch(server, tmp_path / "out", overwrite=True)
    assert os.listdir(tmp_path / "out") == ["a"]
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["directory", "link", "empty directory", "file", "dangling link"])
def test_a_directory_of_the_user_is_not_used_as_working_directory(tmp_path: Path, kind: str) -> None:
    mine, partial = tmp_path / "elsewhere", tmp_path / "out.partial"
    if kind == "link":
        mine.mkdir()
        partial.symlink_to(mine)
    elif kind == "dangling link":
        partial.symlink_to(mine)
    elif kind == "file":
        partial.write_text("mine")
    else:
        partial.mkdir()
    if kind in ("directory", "link"):
        (partial / "files").mkdir()
        (partial / "files" / "thesis.txt").write_text("mine")
        (partial / "download.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    with FileServer({"a": 5}) as server:
        with pytest.raises(errors.TransferError, match=r"out\.partial .*nothing was done") as caught:
            fetch(server, tmp_path / "out", overwrite=True)
        assert server.seen == []
    assert "another name" in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["added file", "linked files", "linked directory"])
def test_things_of_the_user_in_an_unfinished_download_stay(tmp_path: Path, kind: str) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    with FileServer({"a": 6 * PART, "deep/b": 5}) as server:
        stopped_halfway(server, tmp_path / "out")
        work = tmp_path / "out.partial"
        if kind == "added file":
            (work / "notes.txt").write_text("mine")
        elif kind == "linked files":
            (work / "files").rename(tmp_path / "moved")
            (work / "files").symlink_to(mine)
        else:
            (work / "files" / "deep").symlink_to(mine)
        before, seen = files_below(tmp_path), len(server.seen)
        with pytest.raises(errors.TransferError, match="nothing was done"):
            fetch(server, tmp_path / "out")
        assert len(server.seen) == seen
    assert files_below(tmp_path) == before


def test_a_target_that_a_killed_download_had_moved_away_is_moved_back(tmp_path: Path) -> None:
    """With `overwrite`, a download moves the old target away before it moves the new one there.

    A process that is killed between these two steps leaves no target.
    """
    with FileServer({"a": 6 * PART}) as server:
        stopped_halfway(server, tmp_path / "out")
        old = tmp_path / "out.partial" / "old"
        old.mkdir()
        (old / "mine").write_text("mine")
        with pytest.raises(errors.TransferError, match="exists already"):
            fetch(server, tmp_path / "out")
    assert files_below(tmp_path / "out") == {"mine": b"mine"}


@pytest.mark.parametrize("draft", [".archive.json.ab1_cd2.new", "archive.json.12345.new"])
def test_a_draft_of_a_killed_process_is_removed(tmp_path: Path, draft: str) -> None:
    with PartialDirectory(tmp_path / "out").hold() as first:
        (first.path / draft).write_text("{")
    with PartialDirectory(tmp_path / "out").hold() as second:
        second.remove()
    assert not second.path.exists()


def test_only_one_of_two_processes_creates_the_working_directory(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with PartialDirectory(target).hold() as first:
        assert [entry.name for entry in tmp_path.iterdir()] == ["out.partial"]
        with pytest.raises(errors.TransferError, match="under way"), PartialDirectory(target).hold():
            raise AssertionError("two hold it")
        first.remove()
    assert os.listdir(tmp_path) == []


def test_full_disk_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=66 * PART))
    with FileServer({"a": 3 * PART}) as server, pytest.raises(errors.TransferError, match="are needed"):
        fetch(server, tmp_path / "out")
    assert len(server.asked()) == 1


def test_second_download_to_same_target_fails(tmp_path: Path) -> None:
    entered, leave = threading.Event(), threading.Event()

    def before(_: Any) -> None:
        entered.set()
        leave.wait(120)

    with FileServer({"a": 5}, before=before) as server, client_of(server) as rest:
        first = rest.download_checkpoint(EXTERNAL, tmp_path / "out")
        assert entered.wait(120)
        with pytest.raises(errors.TransferError, match="under way"):
            rest.download_checkpoint(EXTERNAL, tmp_path / "out").result(120)
        leave.set()
        first.result(120)
    assert os.listdir(tmp_path) == ["out"]


def test_unwritable_target_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with FileServer({"a": 5}) as server, pytest.raises(errors.TransferError, match="cannot be written"):
        fetch(server, tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("tinker://run/other/final",), {}),
        ((EXTERNAL,), {"parts": 0}),
        ((EXTERNAL, "/"), {}),
        ((EXTERNAL, "up/.."), {}),
    ],
)
def test_invalid_arguments_are_refused_at_once(arguments: tuple[str, ...], options: dict[str, Any]) -> None:
    with FileServer({}) as server, client_of(server) as rest, pytest.raises(errors.InvalidInputError):
        rest.download_checkpoint(*arguments, **options)
    assert server.seen == []


# ------------------------------------------------------------------------------------------- archives


@pytest.mark.parametrize("expires_header", [True, False])
def test_archive_is_unpacked(tmp_path: Path, expires_header: bool) -> None:
    tar = Tar(3 * PART + 5)
    with FileServer({"archive": tar}, cut=PART, expires_header=expires_header) as server:
        got = fetch(server, tmp_path / "out", SAMPLER)
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == tar.inner.read()
    assert got.files == (DownloadedFile("adapter_model.safetensors", 3 * PART + 5),)
    assert os.listdir(tmp_path) == ["out"]


def test_archive_can_be_kept_packed(tmp_path: Path) -> None:
    tar = Tar(3 * PART + 5)
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
def test_bad_archive_leaves_nothing(tmp_path: Path, bad: bytes, error: type[Exception]) -> None:
    data = write(tmp_path / "made", bad).read_bytes()
    (tmp_path / "made").unlink()
    with FileServer({"archive": Bytes(data)}) as server, pytest.raises(error):
        fetch(server, tmp_path / "in" / "out", SAMPLER)
    assert not (tmp_path / "outside").exists()
    assert not (tmp_path / "in" / "out").exists()


class BareNames(FileServer):
    """A server like SkyRL, which has archives of sampler checkpoints only, at paths without a kind."""

    @property
    def archive(self) -> bool:
        return "weights/" not in self.seen[-1].path

    @archive.setter
    def archive(self, _: bool) -> None: ...

    def archives_asked(self) -> list[str]:
        paths = [seen.path for seen in self.seen if seen.path.endswith("/archive")]
        return [path.rpartition("/checkpoints/")[2] for path in paths if "/checkpoints/" in path]


OPEN = {"pjwt_auth_enabled": False, "fwdbwd_max_chunk_len": 1024}


@pytest.mark.parametrize("path", [SAMPLER, "tinker://run/final"])
def test_the_bare_name_of_a_sampler_checkpoint_is_the_fallback(tmp_path: Path, path: str) -> None:
    with BareNames({"archive": Tar(5)}, config=OPEN) as server:
        fetch(server, tmp_path / "out", path)
    assert server.archives_asked() == ["sampler_weights/final/archive", "final/archive"]


def test_the_bare_name_of_a_training_checkpoint_is_not_asked_for(tmp_path: Path) -> None:
    """At the bare name, the server would send the archive of the sampler checkpoint with that name."""
    with BareNames({"archive": Tar(5)}, config=OPEN) as server:
        with pytest.raises(errors.NotFoundError):
            fetch(server, tmp_path / "out", "tinker://run/weights/final")
        server.archive_status = 405
        with pytest.raises(errors.UnsupportedByServerError, match="save_weights_for_sampler"):
            fetch(server, tmp_path / "out", "tinker://run/weights/final")
    assert set(server.archives_asked()) == {"weights/final/archive"}
    assert os.listdir(tmp_path) == []


def test_missing_archive_support_is_reported(tmp_path: Path) -> None:
    with FileServer({}, archive=False) as server:
        with pytest.raises(errors.UnsupportedByServerError, match="save_weights_external"):
            fetch(server, tmp_path / "out", SAMPLER)
        server.config = OPEN
        with pytest.raises(errors.NotFoundError):
            fetch(server, tmp_path / "out", SAMPLER)
    assert os.listdir(tmp_path) == []


def test_a_fresh_address_is_asked_for_at_once_after_the_first_refused_one_alone() -> None:
    reset, refused = OSError("reset"), response_head.TryAgain("403", refused=True)
    after_reset = response_head.Attempts(0.0)
    after_reset.count_failure(reset, 1.0)
    after_reset.count_failure(refused, 2.0)
    assert after_reset.pause_s(refused, 1.0) == 0.0
    after_progress = response_head.Attempts(0.0)
    after_progress.progressed = True
    after_progress.count_failure(refused, 1.0)
    after_progress.count_failure(reset, 2.0)
    assert after_progress.pause_s(reset, 1.0) > 0.0


# --------- The heads of responses that carry a file: pauses that the server asks for, and checksums
def test_the_pause_that_the_server_asks_for_is_kept() -> None:
    busy: Any = SimpleNamespace(status=503, headers=HeaderMap({"Retry-After": "7"}))
    with pytest.raises(TryAgain) as caught:
        read_head(busy, 0, 10, 0.0, encoded=False)
    assert (caught.value.after_s, caught.value.refused) == (7.0, False)


@pytest.mark.parametrize(
    "header",
    [
        {"content-md5": "1B2M2Y8AsgTpgAmY7PhCfg=="},
        {"content-digest": "sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:"},
    ],
)
def test_a_checksum_of_the_body_is_not_one_of_the_file_if_the_body_is_a_part(header: dict[str, str]) -> None:
    assert find_checksum(header, whole=True) is not None
    assert find_checksum(header, whole=False) is None


# ------------------------------------------- Signed addresses of files: when new ones are requested
def test_addresses_that_were_renewed_meanwhile_are_not_renewed_again() -> None:
    signed: list[int] = []

    def sign() -> SignedUrls:
        signed.append(len(signed))
        return SignedUrls({"a": f"http://files/{len(signed)}"}, None)

    links = SignedLinks(sign, FakeClock())
    _, number = links.get("a")
    links.renew(number)  # one part found them refused
    assert links.get("a")[0] == "http://files/2"
    links.renew(number)  # so did another part, which had used the old ones
    assert links.get("a")[0] == "http://files/2"
    assert len(signed) == 2
