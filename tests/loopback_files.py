"""A web server on this machine with one file, which fails as it is told to."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """Serves `content` at /data.bin.

    Attributes:
        requests: method of each.
        fails: it refuses to send the file, of which it reports the facts.
        cut_at: the byte at which it ends the connection.
        waits_at: the byte at which it waits until `goes_on` is set.
        reported: the length that it reports of the file, where it is another.
        status: what it answers, where that is not 200.
    """

    def __init__(self, content: bytes) -> None:
        self.content, self.etag, self.status = content, '"first"', 200
        self.requests: list[str] = []
        self.fails = False
        self.reported: int | None = None
        self.cut_at: int | None = None
        self.waits_at: int | None = None
        self.goes_on = threading.Event()
        self.address = ""

    @property
    def url(self) -> str:
        return f"{self.address}/data.bin"


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
            state.requests.append(self.command)
            if self.path.partition("?")[0] != "/data.bin":
                self.send_error(404)
                return
            if state.status != 200 or (body and state.fails):
                self.send_error(state.status if state.status != 200 else 503)
                return
            content = state.content
            self.send_response(200)
            self.send_header("ETag", state.etag)
            length = len(content) if body or state.reported is None else state.reported
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if not body:
                return
            with contextlib.suppress(ConnectionError):  # who asked may be gone
                if state.cut_at is not None:
                    self.wfile.write(content[: state.cut_at])
                    self.close_connection = True
                    return
                self.wfile.write(content[: state.waits_at])
                if state.waits_at is not None:
                    state.goes_on.wait()
                    self.wfile.write(content[state.waits_at :])

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
