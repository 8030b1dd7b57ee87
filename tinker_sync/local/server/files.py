"""Files to download: exported checkpoints, archives, traces. Their addresses are signed and expire.

A request to such an address needs no key.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import re
import tarfile
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from email.utils import format_datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, unquote

from tinker_sync.local.server.calls import Answer, Calls
from tinker_sync.local.server.problems import Refused
from tinker_sync.local.server.rest import _named
from tinker_sync.types.checkpoint import ExternalWeightsUrlsResponse
from tinker_sync.wire import json as json_codec
from tinker_sync.wire.paths import segment

if TYPE_CHECKING:
    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.service import Service
    from tinker_sync.local.store import CheckpointKind
    from tinker_sync.local.store.folders import StoredFile

calls = Calls()

PREFIX: Final = "/api/v1/files/"
_PIECE_BYTES: Final = 256 * 1024
_RANGE: Final = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
_OCTETS: Final = "application/octet-stream"


# ------------------------------------------------------------------------------------------------ addresses


@calls.of("get_external_weights_urls")
async def get_external_weights_urls(service: Service, ask: Ask) -> Any:
    """Return a signed address for each file of an exported checkpoint."""
    key: tuple[str, CheckpointKind, str] = (ask.ids["run"], "external", ask.ids["name"])
    tinker_path = (await service.on_disk(service.store.checkpoint, *key)).tinker_path
    files = await service.on_disk(service.store.checkpoint_files, *key)
    urls = {}
    expires = 0
    for name in sorted(files):
        path = f"{PREFIX}external/{segment(key[0])}/{segment(key[2])}/{segment(name)}"
        urls[name], expires = signed_url(service, ask, path)
    service.note_event("checkpoint_read", tinker_path, purpose="download")
    return ExternalWeightsUrlsResponse(urls=urls, expires=datetime.fromtimestamp(expires, timezone.utc))


def signed_url(service: Service, ask: Ask, path: str) -> tuple[str, int]:
    """Return a signed address for a path, and the moment at which it expires, in seconds since 1970."""
    query, expires = service.signer.query(path, service.flags.url_life_s)
    return f"http://{ask.headers.get('host', 'localhost')}{path}?{query}", expires


@calls.of("get_checkpoint_archive")
async def get_checkpoint_archive(service: Service, ask: Ask) -> Any:
    """Redirect to the signed address of an archive of a checkpoint's files, as older servers do."""
    run_id, kind, name = await _named(service, ask)
    found = await service.on_disk(service.store.checkpoint, run_id, kind, name)
    url, expires = signed_url(
        service, ask, f"{PREFIX}archive-{kind}/{segment(run_id)}/{segment(name)}/{segment(name)}.tar.gz"
    )
    service.note_event("checkpoint_read", found.tinker_path, purpose="download")
    moment = format_datetime(datetime.fromtimestamp(expires, timezone.utc), usegmt=True)
    return Answer(status=302, headers={"location": url, "expires": moment})


@calls.of("export_session_trace")
async def export_session_trace(service: Service, ask: Ask) -> Any:
    """Return the signed address of a session's trace: the times of its work, in a file for trace viewers."""
    session_id = ask.ids["session"]
    await service.on_disk(service.store.session, session_id)
    path = f"{PREFIX}trace/{segment(session_id)}/trace/trace.json"
    return {"status": "ready", "url": signed_url(service, ask, path)[0]}


# ------------------------------------------------------------------------------------------------ downloads


async def fetch(service: Service, method: str, path: str, query: bytes, headers: dict[str, str]) -> Answer:
    """Return a file.

    The files of checkpoints come with ranges and checksums, so that clients can resume a download. Archives
    and traces come whole, because each request makes them anew.

    Raises:
        Refused: the method is neither GET nor HEAD, the address is not genuine or too old, there is no such
            file, or the range lies outside it.
        StoreError: the checkpoint does not exist.
    """
    if method not in ("GET", "HEAD"):
        raise Refused(405, "files can only be fetched")
    check_address(service, path, query)
    kind, owner, name, file = (unquote(part) for part in path.removeprefix(PREFIX).split("/"))
    if kind == "trace":
        return Answer(_trace(service, owner), content_type=_OCTETS)
    checkpoint: Any = kind.removeprefix("archive-")
    files = await service.on_disk(service.store.checkpoint_files, owner, checkpoint, name)
    try:
        if kind.startswith("archive-"):
            return Answer(await service.on_disk(_archive, files), content_type=_OCTETS)
        if file not in files:
            raise Refused(404, "there is no such file")
        return await _file(service, files[file], headers)
    except FileNotFoundError:  # deleted after its record was read
        raise Refused(404, "the checkpoint was deleted or replaced") from None


def check_address(service: Service, path: str, query: bytes) -> None:
    """Raise `Refused` if the signature of an address is wrong or has expired."""
    given = parse_qs(query.decode("latin-1"))
    expires, signature = (given.get(name, [""])[0] for name in ("expires", "signature"))
    if not service.signer.allows(path, expires, signature):
        raise Refused(403, "this address is not valid, or not any more")


def _trace(service: Service, session_id: str) -> bytes:
    session = service.sessions.get(session_id)
    spans = [] if session is None else list(session.spans)
    return json_codec.dumps({"displayTimeUnit": "ms", "traceEvents": spans})


def _archive(files: dict[str, StoredFile]) -> bytes:
    # The numbers of a model hardly get smaller, so the quickest compression will do.
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in sorted(files):
            content = files[name].path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


async def _file(service: Service, stored: StoredFile, headers: dict[str, str]) -> Answer:
    tag = f'"{stored.sha256}"'
    common = {
        "etag": tag,
        "accept-ranges": "bytes",
        "repr-digest": f"sha-256=:{base64.b64encode(bytes.fromhex(stored.sha256)).decode()}:",
        "cache-control": "private, no-transform",
    }
    if tag in headers.get("if-none-match", ""):
        return Answer(status=304, headers=common)
    start, end, status = 0, stored.size_bytes, 200
    if headers.get("if-range", tag) == tag:
        part = _range(headers.get("range", ""), stored.size_bytes)
        if part is not None:
            start, end, status = *part, 206
            common["content-range"] = f"bytes {start}-{end - 1}/{stored.size_bytes}"
    common["content-length"] = str(end - start)
    await service.on_disk(stored.path.stat)

    async def stream(write: Callable[[bytes], Awaitable[None]]) -> None:
        file = await service.on_disk(lambda: stored.path.open("rb"))
        try:
            await service.on_disk(file.seek, start)
            left = end - start
            while left:
                piece = await service.on_disk(file.read, min(_PIECE_BYTES, left))
                if not piece:
                    raise OSError(f"{stored.path.name} became shorter")
                left -= len(piece)
                await write(piece)
        finally:
            await asyncio.shield(service.on_disk(file.close))

    return Answer(status=status, content_type=_OCTETS, headers=common, stream=stream)


def _range(asked: str, size: int) -> tuple[int, int] | None:
    """Return the start of a requested range and its end, which is excluded; None for the whole file.

    Raises:
        Refused: the range is empty or begins after the end of the file.

    >>> _range("bytes=2-4", 10), _range("bytes=-3", 10), _range("bytes=8-", 10), _range("lines=1-2", 10)
    ((2, 5), (7, 10), (8, 10), None)
    """
    found = _RANGE.fullmatch(asked.strip())
    if found is None or not (found[1] or found[2]):
        return None  # no range, or several ranges, to which a server may answer with the whole file
    if not found[1]:
        start, end = max(0, size - int(found[2])), size
    else:
        start, end = int(found[1]), min(size, int(found[2]) + 1) if found[2] else size
    if start >= end:
        problem = Refused(416, f"the file has {size} bytes")
        raise problem
    return start, end
