"""Addresses of hubs and of members' servers: validation, and safe connections to Unix sockets."""

from __future__ import annotations

import re
import socket

import msgspec

from penstock.net.unix_sockets import connect_unix, private_socket_fault

PEER_URL_PATTERN = (
    r"^(?:unix://(/[!-~]{1,106})"
    r"|http(s?)://(?:\[([0-9A-Fa-f:.]{2,45})\]|([A-Za-z0-9_.-]{1,253})):([0-9]{1,5}))\Z"
)
"""`unix:///path`, `http://host:port` or `https://[v6]:port`, with nothing after it. A Unix path has at most 107 bytes.
Source: unix(7)."""
_PEER_URL = re.compile(PEER_URL_PATTERN)


class PeerAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a member's server: `host` and `port`, or the `path` of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str = ""
    is_tls: bool = False


def parse_peer_url(url: str) -> PeerAddress | None:
    """Parse a member's URL. Return None for an invalid address."""
    # Another member chose this string, so do not use urlsplit, which accepts users, queries and spaces.
    match = _PEER_URL.fullmatch(url)
    if match is None:
        return None
    path, tls, v6, host, port = match.groups()
    if path:
        return PeerAddress(path=path)
    return PeerAddress(host=v6 or host, port=int(port), is_tls=bool(tls)) if 0 < int(port) <= 65535 else None


def connect_peer_socket(path: str, timeout_s: float) -> socket.socket:
    """Connect to a Unix socket. Raise PermissionError if another user's process is listening, or OSError on failure."""
    # The socket may have been replaced since it was chosen, so check again.
    if fault := private_socket_fault(path):
        raise PermissionError(fault)
    return connect_unix(path, timeout_s)


class HubEndpoint:
    """The fixed address of a hub. The subclass `local_hub.LocalEndpoint` follows this host's hub to a new process.

    Attributes:
        is_busy: whether the hub missed a deadline although its process is running, so a retry will probably succeed.
    """

    is_busy = False

    def __init__(self, url: str) -> None:
        self._url = url

    def reach(self, within_s: float) -> str:
        """Return the hub's URL: `unix:///path`, `http://host:port`, `https://...`."""
        return self._url

    def reached(self) -> None:
        """Record that the hub responded."""

    def failed(self, url: str, *, silent: bool) -> None:
        """Record a failed request. `silent` means that the hub accepted the request and did not respond."""

    def close(self) -> None:
        """Release the endpoint."""
