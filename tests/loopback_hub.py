"""A hub on the loopback interface: the part of huggingface.co's API that `huggingface_hub` uses to fetch a model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_do_not_tell_anyone"
Files = dict[str, dict[str, bytes]]


@dataclass
class Site:
    """acme/tiny is open; acme/gated and acme/private ask for `TOKEN`; acme/broken fails. All have the same files.

    files: contents by name, of each revision. requests: all so far.
    """

    files: Files
    address: str = ""
    requests: list[str] = field(default_factory=list)

    def commit(self, revision: str) -> str:
        return hashlib.sha1(revision.encode()).hexdigest()

    @property
    def fetched(self) -> list[str]:
        """Files that went over the wire, in order."""
        return [request.split("/", 5)[-1] for request in self.requests if request.startswith("GET /acme/")]


@contextmanager
def serve(files: Files) -> Iterator[Site]:
    """The site, for as long as the block lasts."""
    site = Site(files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, site))
    site.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, site: Site, *arguments: Any) -> None:
        self.site = site
        super().__init__(*arguments)

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.site.requests.append(f"{self.command} {path}")
        token = self.headers.get("Authorization")
        if path == "/api/agent-harnesses":  # the client's own affair, once a day
            self.reply(200, {"Content-Type": "application/json"}, b'{"harnesses": {}}')
        elif "acme/broken" in path:
            self.reply(500)
        elif token not in (None, f"Bearer {TOKEN}"):
            self.reply(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif ("acme/private" in path and token is None) or not path.startswith(("/api/models/acme/", "/acme/")):
            self.reply(401, {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/models/"):
            self.metadata(path.removeprefix("/api/models/").split("/"))
        elif "acme/gated" in path and token is None:
            self.reply(401, {"X-Error-Code": "GatedRepo"})
        else:
            self.file(path.removeprefix("/").split("/", 4))

    def metadata(self, parts: list[str]) -> None:
        """`owner/name[/revision/REVISION]` or `owner/name/tree/COMMIT`."""
        files, kind, revision = self.site.files, parts[2:3], "/".join(parts[3:]) or "main"
        found = [name for name in files if revision in (name, self.site.commit(name))]
        if not found:
            self.reply(404, {"X-Error-Code": "RevisionNotFound"})
            return
        contents = files[found[0]]
        answer: Any = {
            "id": "/".join(parts[:2]),
            "sha": self.site.commit(found[0]),
            "siblings": [{"rfilename": name} for name in contents],
            "tags": [],
            "private": False,
        }
        if kind == ["tree"]:
            answer = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in contents.items()
            ]
        self.reply(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def file(self, parts: list[str]) -> None:
        """`owner/name/resolve/COMMIT/file`."""
        commit, name = parts[3], parts[4]
        content = next(held[name] for revision, held in self.site.files.items() if self.site.commit(revision) == commit)
        tag = hashlib.sha1(content).hexdigest()
        self.reply(200, {"ETag": f'"{tag}"', "X-Repo-Commit": commit}, content)

    def reply(self, status: int, headers: dict[str, str] | None = None, content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


def user_of(site: str, home: str) -> dict[str, str]:
    """Environment of a user of that site: nothing of the real hub's, a cache of their own."""
    return {
        "HF_ENDPOINT": site,
        "HF_HOME": home,
        "HF_HUB_CACHE": f"{home}/hub",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "NO_PROXY": "*",
    }
