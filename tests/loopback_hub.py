"""A hub on the loopback interface: the part of huggingface.co's API that fetches and uploads models and data sets."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_do_not_tell_anyone"
Files = dict[str, dict[str, bytes]]
_OURS = ("/api/models/acme/", "/api/datasets/acme/", "/acme/", "/datasets/acme/")


@dataclass
class Site:
    """acme/tiny is open; acme/gated and acme/private ask for `TOKEN`; acme/broken fails. All have the same files.

    Each is a model and a data set.

    files: contents by name, of each revision. requests: all so far. uploaded: contents by name, of each repository
    that was made with `TOKEN`. large: contents by SHA-256, which a commit then names.
    """

    files: Files
    address: str = ""
    requests: list[str] = field(default_factory=list)
    uploaded: Files = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)

    def commit(self, revision: str) -> str:
        return hashlib.sha1(revision.encode()).hexdigest()

    @property
    def fetched(self) -> list[str]:
        """Files that went over the wire, in order."""
        gets = [request.removeprefix("GET ").removeprefix("/datasets") for request in self.requests]
        return [request.split("/", 5)[-1] for request in gets if request.startswith("/acme/")]


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

    def do_POST(self) -> None:
        self.answer()

    def do_PUT(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.site.requests.append(f"{self.command} {path}")
        token = self.headers.get("Authorization")
        if path == "/api/agent-harnesses":  # the client's own affair, once a day
            self.reply(200, {"Content-Type": "application/json"}, b'{"harnesses": {}}')
        elif path.startswith("/large/"):  # its address was given to whoever may upload
            self.site.large[path.removeprefix("/large/")] = content
            self.reply(200)
        elif "acme/broken" in path:
            self.reply(500)
        elif token not in (None, f"Bearer {TOKEN}"):
            self.reply(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif self.command == "POST" and (answer := self.upload(path, content)) is not None:
            status = 200 if token is not None else 401
            self.reply(status, {"Content-Type": "application/json"}, json.dumps(answer).encode())
        elif ("acme/private" in path and token is None) or not path.startswith(_OURS):
            self.reply(401, {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/"):
            self.metadata(path.split("/")[3:], content)
        elif "acme/gated" in path and token is None:
            self.reply(401, {"X-Error-Code": "GatedRepo"})
        else:
            self.file(path.removeprefix("/datasets").removeprefix("/").split("/", 4))

    def upload(self, path: str, content: bytes) -> Any:
        """The answer to a request of an upload, each of which has JSON; None to any other request."""
        address, site = self.site.address, self.site
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            made = json.loads(content)
            assert made["visibility"] == "private"
            site.uploaded.setdefault(name := f"{made['organization']}/{made['name']}", {})
            return {"url": f"{address}/{name}", "name": name}
        if path.endswith("/preupload/main"):
            modes = {".safetensors": "lfs"}
            files = [file["path"] for file in json.loads(content)["files"]]
            uploads = [{"path": name, "uploadMode": modes.get(PurePosixPath(name).suffix, "regular")} for name in files]
            return {"files": [upload | {"shouldIgnore": False} for upload in uploads]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(content)["objects"]
            places = [{"upload": {"href": f"{address}/large/{each['oid']}"}} for each in objects]
            return {"objects": [each | {"actions": place} for each, place in zip(objects, places, strict=True)]}
        if path.endswith("/commit/main"):
            repository = path.removeprefix("/api/models/").removesuffix("/commit/main")
            for line in content.splitlines():
                key, value = (entry := json.loads(line))["key"], entry["value"]
                if key == "file":
                    site.uploaded[repository][value["path"]] = base64.b64decode(value["content"])
                elif key == "lfsFile":
                    site.uploaded[repository][value["path"]] = site.large[value["oid"]]
            return {"commitUrl": f"{address}/{repository}/commit/{'0' * 40}", "commitOid": "0" * 40}
        return None

    def metadata(self, parts: list[str], asked: bytes) -> None:
        """`owner/name[/revision/REVISION]`, `owner/name/tree/COMMIT[/FOLDER]` or `owner/name/paths-info/COMMIT`."""
        files, kind, revision, folder = self.site.files, parts[2:3], *["/".join(parts[3:4]) or "main", parts[4:]]
        if kind == ["revision"]:  # which may be refs/convert/parquet
            revision = "/".join(parts[3:])
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
            answer = _listed(contents, "/".join(folder))
        elif kind == ["paths-info"]:
            wanted = parse_qs(asked.decode())["paths"]
            answer = [each for each in _listed(contents) if each["path"] in wanted]
        self.reply(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def file(self, parts: list[str]) -> None:
        """`owner/name/resolve/COMMIT/file`."""
        commit, name = parts[3], parts[4]
        if not any(name in held for revision, held in self.site.files.items() if self.site.commit(revision) == commit):
            self.reply(404, {"X-Error-Code": "EntryNotFound"})
            return
        content = next(held[name] for revision, held in self.site.files.items() if self.site.commit(revision) == commit)
        headers = {"ETag": f'"{_git_hash(content)}"', "X-Repo-Commit": commit}
        if asked := self.headers.get("Range"):
            first, last = (int(number) for number in asked.removeprefix("bytes=").split("-"))
            self.reply(206, headers, content[first : last + 1])
        else:
            self.reply(200, headers, content)

    def reply(self, status: int, headers: dict[str, str] | None = None, content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


def _listed(contents: dict[str, bytes], folder: str = "") -> list[dict[str, Any]]:
    """Files and folders below `folder`, as the hub lists them recursively."""
    inside = {name: content for name, content in contents.items() if name.startswith(f"{folder}/" if folder else "")}
    folders = {str(parent) for name in inside for parent in PurePosixPath(name).parents} - {".", folder}
    return [
        *({"type": "directory", "path": name, "size": 0, "oid": "0" * 40} for name in sorted(folders)),
        *(
            {"type": "file", "path": name, "size": len(content), "oid": _git_hash(content)}
            for name, content in inside.items()
        ),
    ]


def _git_hash(content: bytes) -> str:
    """What the hub calls a file that is not large."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def user_of(site: str, home: str) -> dict[str, str]:
    """Environment of a user of that site: nothing of the real hub's, a cache of their own."""
    return {
        "HF_ENDPOINT": site,
        "HF_HOME": home,
        "HF_HUB_CACHE": f"{home}/hub",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
        "HF_UPDATE_DOWNLOAD_COUNTS": "0",
        "NO_PROXY": "*",
    }
