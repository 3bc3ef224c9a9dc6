"""Facts from the kernel about a process, for tests."""

from __future__ import annotations

import os
from pathlib import Path

_LISTEN = "0A"
"""TCP_LISTEN in /proc/net/tcp. Source: include/net/tcp_states.h."""


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports that a process listens on, of IPv4 and IPv6, sorted."""
    held = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue  # closed since
        if target.startswith("socket:["):
            held.add(target.removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTEN and words[9] in held:
                ports.add(int(words[1].rpartition(":")[2], 16))
    return sorted(ports)
