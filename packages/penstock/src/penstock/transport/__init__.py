"""Reads of a peer's memory by one protocol, and the registration of transports.

In / Out: a `TransportKind` for `register_transport`, and the types that a transport is written with.
Not here: which bytes cross and when (`plan`, `fetch`, `sync`).

`loopback` is the reference. `cuda_ipc`, `shm`, `nixl`, `http` and `into_device` read a peer's memory, and
`mapped_region` maps it without a copy. `choose` selects one and says why. `host_endpoint` keeps the fence,
`fd_server` sends memory to processes of one host, and `collective` has the collectives of `load(group=)`, each with
a deadline.
"""

from penstock.transport.choose import TransportKind, TransportSetup, register_transport
from penstock.transport.protocol import Descriptor, Handle, Memory, PendingRead, Transport

__all__ = [
    "Descriptor",
    "Handle",
    "Memory",
    "PendingRead",
    "Transport",
    "TransportKind",
    "TransportSetup",
    "register_transport",
]
