"""A double of the Hugging Face hub on loopback, with the calls that the upload of a folder needs.

`HF_ENDPOINT` points huggingface_hub here, and `HF_HUB_DISABLE_XET=1` makes it send large files by git LFS.
Like the real hub it answers 404 for a repository name without an owner, and for a missing branch.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from attrs import define, field

TOKEN = "hf_test_token"  # only this hub accepts it
USER = "ada"
COMMIT = "c" * 40


@define
class Repository:
    """A repository: its files, by branch and path, and its visibility."""

    private: bool = False
    branches: dict[str, dict[str, bytes]] = field(factory=lambda: {"main": {}})


class HubRefusal(Exception):
    """The refusal of a request: status, code, message, and more fields of the body."""

    def __init__(self, status: int, code: str, message: str, **more: str) -> None:
        super().__init__(message)
        self.status, self.code, self.body = status, code, {"error": message, **more}


class Hub:
    """A hub that serves at `url` inside a `with` block. An `easy` hub adds missing branches and owners."""

    def __init__(self, *, easy: bool = False) -> None:
        self.easy = easy
        self.repositories: dict[str, Repository] = {}
        self.commits: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self._large: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": self}))
        self._server.daemon_threads = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="hub")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, method: str, target: str, body: bytes) -> Any:
        """Return the answer to a request: a tree, which becomes JSON, or bytes.

        Raises:
            HubRefusal: the hub refuses it.
        """
        path, query = unquote(urlsplit(target).path), parse_qs(urlsplit(target).query)
        for verb, pattern, do in self._routes():
            found = re.fullmatch(pattern, path)
            if found and verb == method:
                return do(*found.groups(), body=body, query=query)
        raise HubRefusal(404, "Unknown", f"nothing at {path}")

    def _routes(self) -> list[tuple[str, str, Callable[..., Any]]]:
        return [
            ("GET", "/api/whoami-v2", lambda **_: {"type": "user", "name": USER, "orgs": []}),
            ("POST", "/api/validate-yaml", lambda **_: {"errors": [], "warnings": []}),
            ("POST", "/api/repos/create", self._create),
            ("POST", "/api/models/(.+)/preupload/(.+)", self._preupload),
            ("POST", "/(.+).git/info/lfs/objects/batch", self._batch),
            ("PUT", "/large/([0-9a-f]{64})", self._store),
            ("POST", "/api/models/(.+)/commit/(.+)", self._commit),
            ("GET", "/api/models/(.+?)/revision/(.+)", self._info),
            ("POST", "/api/models/(.+?)/branch/(.+)", self._make_branch),
            ("GET", "/(.+)/resolve/([^/]+)/(.+)", self._resolve),
        ]

    def _create(self, *, body: bytes, **_: Any) -> Any:
        wanted = json.loads(body)
        name = f"{wanted['organization'] or USER}/{wanted['name']}"
        if name in self.repositories:
            raise HubRefusal(409, "Conflict", "You already created it", url=f"{self.url}/{name}")
        self.repositories[name] = Repository(private=wanted.get("visibility") == "private")
        return {"url": f"{self.url}/{name}", "name": name}

    def _branch(self, name: str, revision: str) -> dict[str, bytes]:
        if self.easy and "/" not in name:
            name = f"{USER}/{name}"
        if name not in self.repositories:
            raise HubRefusal(404, "RepoNotFound", "Repository not found")
        branches = self.repositories[name].branches
        if revision not in branches and not self.easy:
            raise HubRefusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return branches.setdefault(revision, {})

    def _preupload(self, name: str, revision: str, *, body: bytes, **_: Any) -> Any:
        self._branch(name, revision)
        return {
            "files": [
                {"path": path, "uploadMode": mode_of(path), "shouldIgnore": False}
                for path in (each["path"] for each in json.loads(body)["files"])
            ]
        }

    def _batch(self, name: str, *, body: bytes, **_: Any) -> Any:
        wanted = json.loads(body)
        self._branch(name, wanted["ref"]["name"] if "ref" in wanted else "main")
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.url}/large/{each['oid']}"}}}
            for each in wanted["objects"]
        ]
        return {"transfer": "basic", "objects": objects}

    def _store(self, oid: str, *, body: bytes, **_: Any) -> Any:
        if hashlib.sha256(body).hexdigest() != oid:
            raise HubRefusal(400, "BadRequest", "other bytes than were announced")
        self._large[oid] = body
        return {}

    def _commit(self, name: str, revision: str, *, body: bytes, query: dict[str, list[str]]) -> Any:
        lines = [json.loads(line) for line in body.splitlines()]
        branch, pull = self._branch(name, revision), "create_pr" in query
        [head] = [line["value"] for line in lines if line["key"] == "header"]
        files = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self._large[value["oid"]]
        self.commits.append(
            {"to": name, "revision": revision, "says": head["summary"], "pull": pull, "files": files}
        )
        if not pull:
            branch.update(files)
        place = f"{self.url}/{name if '/' in name else f'{USER}/{name}'}"
        made = {"commitUrl": f"{place}/commit/{COMMIT}", "commitOid": COMMIT}
        return {**made, "pullRequestUrl": f"{place}/discussions/1"} if pull else made

    def _info(self, name: str, revision: str, **_: Any) -> Any:
        branch = self._branch(name, revision)
        files = [{"rfilename": path} for path in branch]
        return {"id": name, "sha": COMMIT, "private": self.repositories[name].private, "siblings": files}

    def _make_branch(self, name: str, branch: str, *, body: bytes, **_: Any) -> Any:
        """Create a branch from the given starting point, or from main."""
        begun = dict(self._branch(name, json.loads(body).get("startingPoint", "main")))
        branches = self.repositories[name].branches
        if branch.startswith("refs/"):
            raise HubRefusal(400, "BadRequest", f"Invalid reference for a branch: {branch}")
        if branch in branches:
            raise HubRefusal(409, "Conflict", f"Reference already exists: {branch}")
        branches[branch] = begun
        return {}

    def _resolve(self, name: str, revision: str, path: str, **_: Any) -> Any:
        branch = self._branch(name, revision)
        if path not in branch:
            raise HubRefusal(404, "EntryNotFound", "Entry not found")
        return branch[path]


def mode_of(path: str) -> str:
    """Return the way in which the hub wants a file to be uploaded: "lfs" or "regular"."""
    return "lfs" if path.endswith((".safetensors", ".bin")) else "regular"


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def _reply(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.asked.append(f"{self.command} {self.path}")
        status, headers = 200, {}
        try:
            self._know_who_asks()
            answer = self.hub.answer(self.command.replace("HEAD", "GET"), self.path, body)
        except HubRefusal as refused:
            status, answer = refused.status, refused.body
            headers = {"X-Error-Code": refused.code, "X-Error-Message": str(refused)}
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        # Clients cache files by their commit, so other bytes need another commit.
        digest = hashlib.sha1(data).hexdigest()
        headers |= {"ETag": f'"{digest}"', "X-Repo-Commit": digest}
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _know_who_asks(self) -> None:
        # The addresses for large files need no key.
        if self.command != "PUT" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise HubRefusal(401, "Unauthorized", "Invalid username or password.")

    do_GET = do_HEAD = do_POST = do_PUT = _reply  # noqa: N815
