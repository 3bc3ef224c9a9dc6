"""One-sided reads between address spaces, by one protocol, and the registration of transports.

In / Out: a `TransportKind` for `register_transport`; see `protocol` for what it opens.
Not here: what crosses and when (`plan`, `fetch`, `sync`).
"""

from penstock.transport.registry import TransportKind, TransportSetup, register_transport

__all__ = ["TransportKind", "TransportSetup", "register_transport"]
