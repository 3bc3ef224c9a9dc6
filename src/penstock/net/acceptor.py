"""Accepting connections in an asyncio loop at a bounded rate, so that connections that are open are served first.

In: a `GuardedListener`, a factory of protocols. Out: connections of the loop, as `loop.create_server` makes them.
Not here: which connections are let in (`admission`), the protocol.

`loop.create_server` accepts whenever the listener is readable. Under a flood of new connections each turn of the loop
then begins with dozens of them, and a request on an open connection waits for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

from penstock.net.listener import GuardedListener

ACCEPTS_A_TURN = 32
"""Connections that are accepted before those that are open are served."""
PAUSE_S = 0.02
"""Pause after a full turn. With `ACCEPTS_A_TURN` this admits 1,600 connections a second, which cost half of a core; the
kernel holds the others, up to `listener.BACKLOG`. 1,000 members that come in one instant are all in after 0.7 s."""


class Acceptor:
    """Accepts connections of one listener; `start` and `close` are called in the loop's thread.

    Args:
        listener: it listens already; its owner closes it.
        make_protocol: called for each connection.
        context: of TLS; None: plain.
    """

    def __init__(
        self, listener: GuardedListener, make_protocol: Callable[[], asyncio.Protocol], context: ssl.SSLContext | None
    ) -> None:
        self._listener, self._make_protocol, self._context = listener, make_protocol, context
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = True

    def start(self) -> None:
        """Accept from now on."""
        if self._is_open:
            self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Accept nothing more. Idempotent; connections go on."""
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                # The kernel is short of memory, or the listener is closed: look again after the pause.
                break
            sock.setblocking(False)
            task = self._loop.create_task(self._connect(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._loop.remove_reader(self._listener)
        self._loop.call_later(PAUSE_S, self.start)

    async def _connect(self, sock: socket.socket) -> None:
        # A peer that ends the TLS handshake, or is cut during it, is the peer's business.
        with contextlib.suppress(OSError):
            await self._loop.connect_accepted_socket(self._make_protocol, sock, ssl=self._context)
