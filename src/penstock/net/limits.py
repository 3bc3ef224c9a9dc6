"""Limits of a listener: numbers of connections, deadlines, and bytes accepted before authentication.

In: nothing. Out: `ConnectionLimits`, the defaults of every listener.
Not here: enforcing them (`admission`), deadlines of one message (`timed`).
"""

from __future__ import annotations

import resource
from dataclasses import dataclass

MIN_BYTES_PER_S = 1 << 20
"""Slowest accepted rate of a message, in bytes/s: its deadline moves by 1 s for each MiB. Reason: 8 Mb/s is a poor
link."""
_KEPT_DESCRIPTORS = 128
"""File descriptors kept for other uses: files, libraries, a store. Source: an idle hub has 40 open."""
_MOST_CONNECTIONS = 1 << 16
"""Upper bound of the connections of one listener; 64 Ki connections take about 0.6 GiB in the hub."""
_MOST_UNPROVEN = 1 << 14
"""Upper bound of the unproven connections; 16 Ki take about 0.2 GiB in the hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of one listener. A connection is *proven* once the peer authenticated: by a token, a grant, the same user.

    Attributes:
        total: connections at once. A member serves each in a thread, so this bounds threads, too.
        unproven: connections that have not authenticated yet, part of `total`. Above it the oldest of them is cut, or
            the new one is refused while all are younger than `grace_s`. The rest is reserved for proven connections,
            which are never cut in favour of an unproven one.
        unproven_per_address: the same for one address (one /64 of IPv6), so that one host cannot take all places.
        per_principal: proven connections of one token, member or user; above it the longest idle one is cut.
        head_s: seconds for a TLS handshake and the first head, from the connection on, and for every later head from
            its first byte on. Members send a head in one piece.
        head_bytes: longest head. Ours are below 1 KiB; proxies add a few hundred bytes.
        grace_s: age in seconds below which an unproven connection is not cut in favour of a newer one. It bounds the
            admissions per second: a refusal costs a tenth of an admission.
        idle_s: seconds without a request before a proven connection is cut.
        answer_s: seconds for the peer to read an answer, and one more for each `MIN_BYTES_PER_S` of it.
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
        """Return the limits of a listener whose process may open this many file descriptors."""
        total = max(16, min(num_descriptors - _KEPT_DESCRIPTORS, _MOST_CONNECTIONS))
        # Keeping an unproven connection until its deadline costs memory once. Cutting it early costs CPU time each
        # time the peer connects again.
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
    """Raise this process's soft limit of file descriptors to the hard limit; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return _MOST_CONNECTIONS + _KEPT_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard


def descriptor_limit() -> int:
    """Return the number of file descriptors that this process may have open now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_CONNECTIONS + _KEPT_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
