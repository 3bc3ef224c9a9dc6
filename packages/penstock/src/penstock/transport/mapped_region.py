"""A peer's memory as memory of this process, with no copy: what engines use of a keeper's.

In: descriptors of a peer on this host. Out: addresses, mapped while their owner lives, and a check that the bytes are
still those that were kept.
Not here: reading into memory of our own (`shm`, `cuda_ipc`), whose the memory is and for how long (`cache.attached`).

Host memory is mapped privately: a write here is seen in this process only. Device memory is the peer's own memory: a
write here changes it for every process.
"""

from __future__ import annotations

import mmap

import msgspec
import numpy as np

from penstock.cuda.device_memory import array_interface
from penstock.cuda.driver import CudaDriver, load_driver
from penstock.errors import ConfigError, FormatError
from penstock.transport.cuda_ipc import CudaPayload, Mapped, map_peer
from penstock.transport.host_endpoint import GenerationAddress, MemoryClaim, PeerGenerationTable, handle_here
from penstock.transport.protocol import Descriptor, decode_payload
from penstock.transport.shm import ShmPayload, open_payload

_NORESERVE = 0x4000
"""MAP_NORESERVE: set no memory aside for copies of pages, since none is meant to be written. Without it the kernel may
refuse to map a model as large as the host's memory a second time. Source: Linux, mman-common.h."""

_SHM_DECODER = msgspec.msgpack.Decoder(ShmPayload)
_CUDA_DECODER = msgspec.msgpack.Decoder(CudaPayload)


class HostBytes(mmap.mmap):
    """A private mapping of a peer's memfd; a writable buffer. Unmapped with the last view of it."""

    hold: object = None
    """An object that is to live as long, such as the lease on the memory."""


class DeviceBytes:
    """A peer's device memory, by the CUDA array interface, which torch takes without a copy and keeps alive."""

    def __init__(self, mapped: Mapped, address: int, nbytes: int) -> None:
        self._mapped = mapped
        self.hold: object = None
        self.__cuda_array_interface__ = array_interface(address, nbytes)


class MappedRegion:
    """A registration of a peer, mapped here. Made by `map_region`.

    Attributes:
        address, nbytes: its place in this process.
        device: `"cpu"`, or the device as this process numbers it.
        owner: keeps it mapped: a buffer of the whole mapping, or the CUDA array interface of just these bytes.
        offset: the start of the bytes in `owner`.
    """

    def __init__(
        self, claim: MemoryClaim, device: str, address: int, nbytes: int, owner: HostBytes | DeviceBytes, offset: int
    ) -> None:
        self._claim = claim
        self.device = device
        self.address = address
        self.nbytes = nbytes
        self.owner = owner
        self.offset = offset

    def check(self) -> None:
        """Check that these are still the bytes that were kept.

        Raises:
            PeerLost: the process that kept them is gone. StaleDescriptor: it changed them, or gave them up.
        """
        self._claim.check()


def map_region(source: Descriptor, *, device: int | None = None, driver: CudaDriver | None = None) -> MappedRegion:
    """Map a registration of a peer of this host.

    Args:
        source: of `shm` or `cuda_ipc`.
        device: the number of the peer's device in this process, for `cuda_ipc`.
        driver: stands in for the CUDA driver, in tests.

    Raises:
        ConfigError: another host or runtime directory, or another transport; or device memory of another PID namespace
            that has no file descriptors.
        PeerLost, StaleDescriptor: the peer is gone, or fenced the memory.
        FormatError: the descriptor is malformed, or reaches past the memory that it names.
        DestinationError, PermissionDenied: this system refuses to map it.
    """
    if source.transport == "shm":
        return _map_host(source)
    if source.transport == "cuda_ipc" and device is not None:
        return _map_device(source, device, driver)
    raise ConfigError(f"memory behind {source.transport} cannot be mapped", hint="shm and cuda_ipc can, on one host")


def _claim(source: Descriptor, address: GenerationAddress) -> MemoryClaim:
    claim = MemoryClaim(PeerGenerationTable.open(source, address), source, address)
    claim.check()
    return claim


def _map_host(source: Descriptor) -> MappedRegion:
    payload = decode_payload(source, _SHM_DECODER)
    claim = _claim(source, payload.page)

    def mapping(fd: int) -> HostBytes:
        return HostBytes(fd, 0, flags=mmap.MAP_PRIVATE | _NORESERVE, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    owner = open_payload(claim, payload, mapping)
    if payload.offset + source.nbytes > len(owner):
        message = f"{source.nbytes} bytes from {payload.offset} lie outside the peer's memory of {len(owner)} bytes"
        raise FormatError(message, uri=source.uri)
    address = int(np.frombuffer(owner, np.uint8).ctypes.data) + payload.offset
    return MappedRegion(claim, "cpu", address, source.nbytes, owner, payload.offset)


def _map_device(source: Descriptor, device: int, driver: CudaDriver | None) -> MappedRegion:
    payload = decode_payload(source, _CUDA_DECODER)
    driver = load_driver() if driver is None else driver
    claim = _claim(source, payload.page)
    # The driver refuses to open memory of the process itself; it is at its own address already.
    ours = handle_here(source)
    if ours is not None:
        mapped = Mapped(payload.address - payload.offset, payload.offset + source.nbytes, keep=ours)
    else:
        mapped = map_peer(driver, device, source, payload)
        claim.check()
    address = mapped.at(payload.offset, source)
    return MappedRegion(claim, f"cuda:{device}", address, source.nbytes, DeviceBytes(mapped, address, source.nbytes), 0)
