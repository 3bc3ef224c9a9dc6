"""Puts a proxy in front of a member's data port. The proxy sends slowly, or accepts connections and sends nothing.

`http_server` has slow storage, and signals stop members.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

PIECE_BYTES = 16 << 10
"""Maximum number of bytes forwarded at once."""


def throttle_data_port(bytes_per_s: float) -> None:
    """Limit HTTP readers of this process's memory to this rate for each connection. 0 sends nothing."""
    from penstock.transport.http import HttpTransport
    from penstock.transport.http_reader import RegionAddress

    start = HttpTransport.__init__

    def start_behind(self: HttpTransport, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        port = _Proxy(self.address, bytes_per_s).port
        self.address = RegionAddress(host="127.0.0.1", port=port, is_tls=self.address.is_tls)

    HttpTransport.__init__ = start_behind  # type: ignore[method-assign]


class _Proxy:
    """Forwards connections to `behind` in daemon threads until the process ends."""

    def __init__(self, behind: Any, bytes_per_s: float) -> None:
        self._behind, self._bytes_per_s = behind, bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            reader, _ = self._listener.accept()
            if self._behind.path:
                holder = socket.socket(socket.AF_UNIX)
                holder.connect(self._behind.path)
            else:
                holder = socket.create_connection((self._behind.host, self._behind.port))
            threading.Thread(target=self._forward, args=(reader, holder, 0.0), daemon=True).start()
            if self._bytes_per_s:
                pause_s = 1.0 / self._bytes_per_s
                threading.Thread(target=self._forward, args=(holder, reader, pause_s), daemon=True).start()

    @staticmethod
    def _forward(source: socket.socket, sink: socket.socket, pause_s: float) -> None:
        """Forward until either end closes, with a pause of `pause_s` seconds for each byte."""
        # Pause at most a tenth of a second at a time, because one long pause would look like a stall to the reader.
        most = PIECE_BYTES if not pause_s else max(1, min(PIECE_BYTES, int(0.1 / pause_s)))
        with contextlib.suppress(OSError):
            while piece := source.recv(most):
                sink.sendall(piece)
                time.sleep(pause_s * len(piece))
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
