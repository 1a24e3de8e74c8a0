"""A web server on this machine with one file, which gives parts of it, and fails as it is told to."""

import contextlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Serves `content` at /data.bin, part by part where asked.

    Attributes:
        requests: (method, first byte asked for) of each.
        fails_at: from which byte on it answers with an error.
        halves_at: from which byte on it sends half of what it is asked for.
        waits_at: from which byte on it sends nothing until `goes_on` is set.
        reported: the length that it reports of the file, where it is another; and that it gives no parts.
        status: what it answers, where that is not 200.
    """

    def __init__(self, content: bytes) -> None:
        self.content, self.etag, self.ranges, self.status = content, '"first"', True, 200
        self.requests: list[tuple[str, int]] = []
        self.reported: int | None = None
        self.fails_at: int | None = None
        self.halves_at: int | None = None
        self.waits_at: int | None = None
        self.goes_on = threading.Event()
        self.address = ""

    @property
    def url(self) -> str:
        return f"{self.address}/data.bin"

    @property
    def gets(self) -> list[int]:
        """First bytes of what was asked for, but for the question whether there are parts."""
        return [start for method, start in self.requests if method == "GET"]


@contextlib.contextmanager
def serve(content: bytes) -> Iterator[Server]:
    state = Server(content)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start = int(asked[1]) if asked else 0
            if not (asked and asked[1] == asked[2]):
                state.requests.append((self.command, start))
            if self.path.partition("?")[0] != "/data.bin":
                self.send_error(404)
                return
            if state.status != 200:
                self.send_error(state.status)
                return
            if body and state.fails_at is not None and start >= state.fails_at:
                self.send_error(503)
                return
            found = state.content
            if asked and state.ranges:
                stop = int(asked[2]) + 1 if asked[2] else len(found)
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(found)}")
                found = found[start:stop]
                if body and state.halves_at is not None and start >= state.halves_at:
                    found = found[: len(found) // 2]
            else:
                self.send_response(200)
            if state.reported is not None:
                self.send_header("Accept-Ranges", "none")
            self.send_header("ETag", state.etag)
            length = len(found) if body or state.reported is None else state.reported
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if body:
                if state.waits_at is not None and start >= state.waits_at:
                    state.goes_on.wait()
                with contextlib.suppress(ConnectionError):  # who asked may be gone
                    self.wfile.write(found)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as started:
        state.address = f"http://127.0.0.1:{started.server_port}"
        thread = threading.Thread(target=started.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield state
        finally:
            started.shutdown()
            thread.join()
