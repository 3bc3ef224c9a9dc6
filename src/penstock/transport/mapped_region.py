"""A peer's memory as memory of this process, with no copy: what engines use of a keeper's.

In: descriptors of a peer on this host. Out: addresses, mapped while held, and whether they still hold what was kept.
Not here: reading into memory of our own (`shm`, `cuda_ipc`), whose the memory is and for how long (`keeper.attach`).

Host memory is mapped privately: what is written here is seen here only. Device memory is the peer's own, to the letter.
"""

from __future__ import annotations

import mmap

import msgspec
import numpy as np

from penstock.cuda.driver import CudaDriver, load_driver
from penstock.errors import ConfigError
from penstock.transport.cuda_memory import CudaPayload, Mapped, map_peer
from penstock.transport.descriptor import Descriptor, decode_payload
from penstock.transport.generation_table import GenerationAddress, PeerGenerationTable
from penstock.transport.host_endpoint import Claim, handle_here
from penstock.transport.shm import ShmPayload, open_payload

_NORESERVE = 0x4000
"""No room is set aside for pages that may be written: none are meant to be. Source: Linux, mman-common.h."""
_SHM = msgspec.msgpack.Decoder(ShmPayload)
_CUDA = msgspec.msgpack.Decoder(CudaPayload)


class HostBytes(mmap.mmap):
    """A private mapping of a peer's memfd; a writable buffer. Unmapped with the last view of it."""

    hold: object = None
    """Whatever is to live as long."""


class DeviceBytes:
    """A peer's device memory, by the CUDA array interface, which torch takes without a copy and keeps alive."""

    def __init__(self, mapped: Mapped, address: int, nbytes: int) -> None:
        self._mapped = mapped
        self.hold: object = None
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class Region:
    """A registration of a peer, mapped here. Made by `map_region`.

    Attributes:
        address, nbytes: where it is in this process.
        device: `"cpu"`, or the device as this process numbers it.
        owner: keeps it mapped; a buffer of the whole mapping, or what has the CUDA array interface of just these bytes.
        offset: where they start in `owner`.
    """

    def __init__(
        self, claim: Claim, device: str, address: int, nbytes: int, owner: HostBytes | DeviceBytes, offset: int
    ) -> None:
        self._claim, self.device, self.address, self.nbytes = claim, device, address, nbytes
        self.owner, self.offset = owner, offset

    def check(self) -> None:
        """Check that these are still the bytes that were kept.

        Raises:
            PeerLost: who kept them is gone. StaleDescriptor: it changed them, or gave them up.
        """
        self._claim.check()


def map_region(source: Descriptor, *, device: int | None = None, driver: CudaDriver | None = None) -> Region:
    """Map what a peer of this host registered.

    Args:
        source: of `shm` or `cuda_ipc`.
        device: what the peer's device is called here; of `cuda_ipc`.
        driver: stands in for the CUDA driver, in tests.

    Raises:
        ConfigError: another host or PID namespace, or another transport.
        PeerLost, StaleDescriptor: the peer is gone, or fenced the memory.
        FormatError: the descriptor is malformed, or reaches past the memory that it names.
        DestinationError, PermissionDenied: this system does not let us.
    """
    if source.transport == "shm":
        return _map_host(source)
    if source.transport == "cuda_ipc" and device is not None:
        return _map_device(source, device, driver)
    raise ConfigError(f"memory behind {source.transport} cannot be mapped", hint="shm and cuda_ipc can, on one host")


def _claim(source: Descriptor, address: GenerationAddress) -> Claim:
    claim = Claim(PeerGenerationTable.open(source, address), source, address)
    claim.check()
    return claim


def _map_host(source: Descriptor) -> Region:
    payload = decode_payload(source, _SHM)
    claim = _claim(source, payload.page)

    def mapping(fd: int) -> HostBytes:
        return HostBytes(fd, 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    owner = open_payload(source, payload, mapping)
    claim.check()  # so that what was opened was still the peer's
    address = int(np.frombuffer(owner, np.uint8).ctypes.data) + payload.offset
    return Region(claim, "cpu", address, source.nbytes, owner, payload.offset)


def _map_device(source: Descriptor, device: int, driver: CudaDriver | None) -> Region:
    payload = decode_payload(source, _CUDA)
    driver = load_driver() if driver is None else driver
    claim = _claim(source, payload.page)
    ours = handle_here(source)
    if ours is not None:
        mapped = Mapped(payload.address - payload.offset, payload.offset + source.nbytes, keep=ours)
    else:
        mapped = map_peer(driver, device, source, payload)
        claim.check()
    address = mapped.at(payload.offset, source)
    return Region(claim, f"cuda:{device}", address, source.nbytes, DeviceBytes(mapped, address, source.nbytes), 0)
