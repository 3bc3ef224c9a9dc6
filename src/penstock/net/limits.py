"""What connections may cost a listener: how many, for how long, how many bytes before they show who they are.

In: nothing. Out: `ConnectionLimits`, the defaults of every listener.
Not here: who counts and cuts (`admission`), deadlines of one message (`timed`).
"""

from __future__ import annotations

import resource
from dataclasses import dataclass

MIN_BYTES_PER_S = 1 << 20
"""Slowest pace of a message, in bytes/s: it has a second more for each of these. Reason: 8 Mb/s, a poor link."""
_KEPT_DESCRIPTORS = 128
"""Descriptors that a process needs besides its connections: files, libraries, a store. Source: 40 in an idle hub."""
_MOST_CONNECTIONS = 1 << 16
"""Connections of one listener, however many descriptors there are; 64 Ki cost about 0.6 GiB in the hub."""
_MOST_UNPROVEN = 1 << 14
"""Connections without proof, however many descriptors there are; 16 Ki cost about 0.2 GiB in the hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of one listener. A connection is *proven* once it showed who it is: a token, a grant, the same user.

    Attributes:
        total: connections at once. A thread each at a member, so this bounds threads, too.
        unproven: of those, connections that have shown nothing yet; above it the oldest of them is cut, or the new
            one refused while all are younger than `grace_s`. The rest is the reserve of proven ones, which are never
            cut for a stranger.
        unproven_per_address: the same for one address (one /64 of IPv6), so that one host cannot take all of it.
        per_principal: proven connections of one token, member or user; above it its longest idle is cut.
        head_s: seconds for a TLS handshake and the first head, from the connection on, and for every later head from
            its first byte on. Members send a head in one piece.
        head_bytes: longest head. Ours are below 1 KiB; proxies add a few hundred bytes.
        grace_s: seconds that a connection has to show something before it is cut for a newer one. It bounds how many
            are admitted in a second: a refusal costs a tenth of an admission.
        idle_s: seconds without a request before a proven connection is cut.
        answer_s: seconds for an answer to be taken, and one more for each `MIN_BYTES_PER_S` of it.
    """

    total: int = 512
    unproven: int = 256
    unproven_per_address: int = 128
    per_principal: int = 384
    head_s: float = 10.0
    head_bytes: int = 16 << 10
    grace_s: float = 1.0
    idle_s: float = 60.0
    answer_s: float = 30.0

    @classmethod
    def for_descriptors(cls, num_descriptors: int, *, idle_s: float = 60.0, answer_s: float = 30.0) -> ConnectionLimits:
        """Return limits of a listener whose process may open that many descriptors."""
        total = max(16, min(num_descriptors - _KEPT_DESCRIPTORS, _MOST_CONNECTIONS))
        # To hold a stranger until its deadline costs memory once; to cut it early costs time at each of its returns.
        unproven = min(total // 2, _MOST_UNPROVEN)
        return cls(
            total=total,
            unproven=unproven,
            unproven_per_address=max(8, unproven // 4),
            per_principal=max(8, total * 3 // 4),
            idle_s=idle_s,
            answer_s=answer_s,
        )


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of descriptors to the hard one and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return _MOST_CONNECTIONS + _KEPT_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard


def descriptor_limit() -> int:
    """Return how many descriptors this process may have open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS + _KEPT_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
