"""Reads of a peer's memory by one protocol, and the registration of transports.

`loopback` is the reference. `cuda_ipc`, `shm`, `nixl`, `http` and `into_device` read a peer's memory, and
`mapped_region` maps it without a copy. `choose` selects a transport and gives the reason. `host_endpoint` has the
generations of memory, and `fd_server` sends memory to processes on the same host. `collective` has the collectives of
`load(group=)`, each with a deadline.
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
