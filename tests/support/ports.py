"""Free ports for servers that must be told their port before they start."""

from __future__ import annotations

import contextlib
import random
import socket

_FIRST_PORT, _LAST_PORT = 20_000, 32_000
"""Linux takes the ports of outgoing connections and of `bind(port=0)` from 32768 upwards. Below, it takes none."""


def free_ports(count: int) -> list[int]:
    """Return `count` different ports of 127.0.0.1 that were free just now.

    They stay free unless a server asks for one of them by number, because the kernel gives none of them away.
    """
    with contextlib.ExitStack() as stack:
        ports: list[int] = []
        for port in random.SystemRandom().sample(range(_FIRST_PORT, _LAST_PORT), 1000):
            if len(ports) == count:
                break
            probe = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                ports.append(port)
        if len(ports) < count:
            raise RuntimeError(f"found only {len(ports)} of {count} free ports from {_FIRST_PORT} to {_LAST_PORT}")
        return ports
