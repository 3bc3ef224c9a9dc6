"""A peer's memory mapped into this process without a copy, as engines use the memory of a weight cache.

Host memory is mapped privately, so only this process sees a write here. Device memory is the peer's own memory,
so a write here changes it for every process.
"""

from __future__ import annotations

import mmap

import msgspec

from penstock.cuda.device_memory import array_interface
from penstock.cuda.driver import CudaDriver, load_driver
from penstock.errors import ConfigError
from penstock.memory.mapping import READ_WRITE, map_aligned
from penstock.transport.cuda_ipc import CudaPayload, Mapped, map_peer
from penstock.transport.host_endpoint import GenerationAddress, MemoryClaim, PeerGenerationTable, handle_here
from penstock.transport.protocol import Descriptor, decode_payload
from penstock.transport.shm import ShmPayload, open_payload

_SHM_DECODER = msgspec.msgpack.Decoder(ShmPayload)
_CUDA_DECODER = msgspec.msgpack.Decoder(CudaPayload)


class HostBytes(mmap.mmap):
    """A private mapping of a peer's memfd, as a writable buffer, which is unmapped with its last view."""

    hold: object = None
    """An object that must exist as long as the mapping, such as the lease on the memory."""


class DeviceBytes:
    """A peer's device memory with the CUDA array interface. Torch shares the memory and keeps this object alive."""

    def __init__(self, mapped: Mapped, address: int, nbytes: int) -> None:
        self._mapped = mapped
        self.hold: object = None
        self.__cuda_array_interface__ = array_interface(address, nbytes)


class MappedRegion:
    """A peer's registration that `map_region` mapped into this process.

    `device` is `"cpu"`, or the device as numbered in this process. `owner` keeps the memory mapped, as a buffer of the
    whole mapping, in which the bytes start at `offset`, or as the CUDA array interface of the bytes.
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
        """Raise PeerLost if the holding process is gone, or StaleDescriptor if it changed or released the bytes."""
        self._claim.check()


def map_region(source: Descriptor, *, device: int | None = None, driver: CudaDriver | None = None) -> MappedRegion:
    """Map a registration of a peer on this host. `device` is the peer's device, as numbered in this process.

    Raises:
        ConfigError: the memory has a different host, runtime directory or transport, or is device memory from a
            different PID namespace without file descriptors.
        PeerLost, StaleDescriptor: the peer is gone, or fenced the memory.
        FormatError: the descriptor is malformed, or exceeds the memory that it names.
        DestinationError, PermissionDenied: this system refused to map the memory.
    """
    if source.transport == "shm":
        return _map_host(source)
    if source.transport == "cuda_ipc" and device is not None:
        return _map_device(source, device, driver)
    raise ConfigError(
        f"memory of the transport {source.transport} cannot be mapped", hint="use shm or cuda_ipc on one host"
    )


def _claim(source: Descriptor, address: GenerationAddress) -> MemoryClaim:
    claim = MemoryClaim(PeerGenerationTable.open(source, address), source, address)
    claim.check()
    return claim


def _map_host(source: Descriptor) -> MappedRegion:
    payload = decode_payload(source, _SHM_DECODER)
    claim = _claim(source, payload.page)
    owner, start, address = open_payload(
        claim, payload, lambda fd: map_aligned(HostBytes, fd, READ_WRITE, mmap.MAP_PRIVATE)
    )
    return MappedRegion(claim, "cpu", address + payload.offset, source.nbytes, owner, start + payload.offset)


def _map_device(source: Descriptor, device: int, driver: CudaDriver | None) -> MappedRegion:
    payload = decode_payload(source, _CUDA_DECODER)
    driver = load_driver() if driver is None else driver
    claim = _claim(source, payload.page)
    # The driver refuses to open memory of this process, which is already mapped at its own address.
    ours = handle_here(source)
    if ours is not None:
        mapped = Mapped(payload.address - payload.offset, payload.offset + source.nbytes, keep=ours)
    else:
        mapped = map_peer(driver, device, source, payload)
        claim.check()
    claim.check_inside(payload.offset, mapped.nbytes)
    address = mapped.address + payload.offset
    return MappedRegion(claim, f"cuda:{device}", address, source.nbytes, DeviceBytes(mapped, address, source.nbytes), 0)
