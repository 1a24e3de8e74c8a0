"""Messages between two processes of one machine: JSON objects, one a line, over a socket."""

from __future__ import annotations

import json
import select
import socket
from pathlib import Path
from typing import Any

_BYTES_AT_ONCE = 1 << 16


class Channel:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""

    @classmethod
    def connect(cls, path: Path) -> Channel:
        """Connect to the socket at a path, on which another process listens."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(path))
        return cls(connection)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message.

        Raises:
            OSError: the other process has gone.
        """
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Wait for the next message; None once the other process has closed its end."""
        while b"\n" not in self._received:
            try:
                received = self._connection.recv(_BYTES_AT_ONCE)
            except ConnectionResetError:
                return None
            if not received:
                return None
            self._received += received
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def has_message(self, seconds: float = 0.0) -> bool:
        """Wait at most so long for a message; True if there is one, or the other process has closed its end."""
        return b"\n" in self._received or bool(select.select([self._connection], [], [], seconds)[0])

    def close(self) -> None:
        self._connection.close()
