"""`Cassette`: the requests and answers of a run, as a file of JSON lines without secrets.

A replay finds the answer to a request by a key, which consists of the request's method, address and content.
The key leaves out what differs from run to run: bodies that depend on the process, and the sequence numbers
of samples, which depend on the order in which threads submit samples. Pure, except that `save` and `load`
write and read the file.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen

from tinker_sync._base.secret import Secret, mask_json
from tinker_sync._version import __version__
from tinker_sync.errors import ConfigurationError

FORMAT: Final = 1
API: Final = "/api/v1"
# The bodies of these calls depend on the time or on the process, so a replay does not compare them.
_BODY_IS_FREE: Final = re.compile(
    r"/(client/config|client/dynamic_config|create_session|session_heartbeat|telemetry|auth/token|healthz"
    r"|sessions/[^/]+/finish)$"
)
_SIGNED: Final = re.compile(r"(https?://[^\s\"'?]+)\?[^\s\"']+")
_KEPT_HEADERS: Final = ("content-type", "retry-after", "location", "x-should-retry")
# Turns off what a replay lacks: one poll for many requests, compression, tokens in place of keys.
PLAIN_SETTINGS: Final = {
    "sample_use_retrieve_futures": False,
    "proto_compress_fwdbwd": False,
    "pjwt_auth_enabled": False,
}


@frozen
class RecordedReply:
    """An answer of a server, with the headers that a replay sends."""

    status: int
    headers: dict[str, str]
    content: bytes = field(repr=False)


@frozen
class RecordedExchange:
    """A request, reduced to the content that a replay compares, and its answer.

    >>> asked = {"prompt": "a", "seq_id": 3}
    >>> RecordedExchange("POST", "/api/v1/asample", asked, RecordedReply(200, {}, b"")).key
    'POST /asample {"prompt": "a"}'
    """

    method: str
    target: str
    request: Any
    reply: RecordedReply

    @property
    def key(self) -> str:
        """The key by which a replay finds the answer; equal requests share it."""
        return key_of(self.method, self.target, self.request)


def key_of(method: str, target: str, request: Any) -> str:
    """Return the key by which a replay finds the answer to a request.

    >>> key_of("POST", "/api/v1/session_heartbeat", {"session_id": "s"})
    'POST /session_heartbeat'
    """
    place = target.removeprefix(API)
    path = place.partition("?")[0]
    if _BODY_IS_FREE.search(path):
        return f"{method} {path}"
    if isinstance(request, dict):
        ignored = {"seq_id"} if path == "/asample" else {"timeout"}
        request = {name: value for name, value in request.items() if name not in ignored}
    return f"{method} {place}" + ("" if request is None else f" {json.dumps(request, sort_keys=True)}")


def comparable(content_type: str, body: bytes, secrets: Iterable[Secret] = ()) -> Any:
    """Return the form in which a replay compares a body: JSON without secrets, or a checksum of another body.

    An empty body becomes None.

    >>> comparable("application/json", b'{"api_key": "tml-12345678"}')
    {'api_key': '***'}
    >>> comparable("", b"") is None
    True
    """
    if not body:
        return None
    tree = _tree(body) if "json" in content_type else None
    if tree is None:
        return {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)}
    return without_secrets(tree, secrets)


def without_secrets(tree: Any, secrets: Iterable[Secret] = ()) -> Any:
    """Return JSON data with masks for API keys, access tokens and the queries of URLs.

    >>> without_secrets({"url": "https://host/a?sig=b", "note": "tml-abcdefgh", "seed": 3})
    {'url': 'https://host/a?***', 'note': '***', 'seed': 3}
    """
    text = json.dumps(mask_json(tree, tuple(secrets)))
    return json.loads(_SIGNED.sub(r"\1?***", text))


class Cassette:
    """The recorded exchanges, in the order of their answers. Not thread-safe."""

    def __init__(self, exchanges: Iterable[RecordedExchange] = ()) -> None:
        self.exchanges = list(exchanges)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cassette:
        """Return the cassette in a file.

        Raises:
            ConfigurationError: the file does not exist, or is not a cassette.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
            head, *entries = [json.loads(line) for line in lines]
            if head["format"] != FORMAT:
                raise ConfigurationError(f"{path}: format {head['format']} is not known; record it again")
            return cls(_read(entry) for entry in entries)
        except FileNotFoundError as error:
            raise ConfigurationError(
                f"{path}: there is no cassette; record one with tinker_sync.testing.record"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{path} is not a cassette: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the exchanges to a file: of all polls for one result only the last, and no telemetry."""
        head = {"format": FORMAT, "made_by": f"tinker_sync {__version__}"}
        lines = [head, *(_written(exchange) for exchange in self._kept())]
        Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def _kept(self) -> Iterator[RecordedExchange]:
        last_poll = {
            exchange.key: at
            for at, exchange in enumerate(self.exchanges)
            if "/retrieve_future" in exchange.target
        }
        for at, exchange in enumerate(self.exchanges):
            if last_poll.get(exchange.key, at) == at and "/telemetry" not in exchange.target:
                yield exchange


def kept_reply(
    target: str,
    status: int,
    headers: dict[str, str],
    content: bytes,
    secrets: Iterable[Secret],
    *,
    replayable: bool = True,
) -> RecordedReply:
    """Return an answer as a `Cassette` keeps it: without secrets, and with the headers that a replay needs.

    If the answer holds the settings of the server, the features that a replay lacks are turned off in them,
    unless `replayable` is False.
    """
    kept: dict[str, str] = {name: headers[name] for name in _KEPT_HEADERS if name in headers}
    if "location" in kept:
        kept["location"] = without_secrets(kept["location"], secrets)
    tree = _tree(content) if "json" in kept.get("content-type", "") else None
    if tree is not None:
        tree = without_secrets(tree, secrets)
        if replayable and target.endswith("/client/config") and isinstance(tree, dict):
            tree |= PLAIN_SETTINGS
        content = json.dumps(tree).encode()
    return RecordedReply(status, kept, content)


def difference(wanted: Any, recorded: Any) -> str:
    """Describe up to three differences between the bodies of two requests to one address.

    >>> difference({"a": 1, "b": 2}, {"a": 1, "b": 3})
    'b: 2, recorded 3'
    """
    if not (isinstance(wanted, dict) and isinstance(recorded, dict)):
        return "the bodies differ"
    names = [name for name in {**wanted, **recorded} if wanted.get(name) != recorded.get(name)]
    parts = [f"{name}: {_short(wanted.get(name))}, recorded {_short(recorded.get(name))}" for name in names]
    return "; ".join(parts[:3])


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _tree(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _written(exchange: RecordedExchange) -> dict[str, Any]:
    reply = exchange.reply
    tree = _tree(reply.content) if "json" in reply.headers.get("content-type", "") else None
    content = {"json": tree} if tree is not None else {"base64": base64.b64encode(reply.content).decode()}
    return {
        "method": exchange.method,
        "target": exchange.target,
        "request": exchange.request,
        "status": reply.status,
        "headers": reply.headers,
        **content,
    }


def _read(entry: dict[str, Any]) -> RecordedExchange:
    content = json.dumps(entry["json"]).encode() if "json" in entry else base64.b64decode(entry["base64"])
    reply = RecordedReply(entry["status"], entry["headers"], content)
    return RecordedExchange(entry["method"], entry["target"], entry["request"], reply)
