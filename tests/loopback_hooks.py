"""A web server of this machine that takes notices, as a chat program does, or fails in a way that its path names."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "T0-s3cret"
"""A part of each path, as the password of a webhook is."""


@dataclass
class Hooks:
    """What was received. `address(NAME)` takes a notice; those of 404, moved and hang do not."""

    port: int
    notices: list[dict[str, Any]] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def address(self, name: str = "take") -> str:
        return f"http://localhost:{self.port}/{SECRET}/{name}?key={SECRET}"


@contextmanager
def serve() -> Iterator[Hooks]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            name = self.path.split("?")[0].rpartition("/")[2]
            if name == "hang":
                hooks.is_over.wait(60)
            if name == "take":
                hooks.notices.append(json.loads(body))
            self.send_response({"404": 404, "moved": 302}.get(name, 200))
            if name == "moved":
                self.send_header("Location", hooks.address())
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hooks = Hooks(server.server_address[1])
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hooks
    finally:
        hooks.is_over.set()
        server.shutdown()
        server.server_close()
