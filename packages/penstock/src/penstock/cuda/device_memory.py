"""Memory of a device whose address and physical memory are separate: the flip of a staged update exchanges the latter.

In: sizes and devices. Out: an address, and the CUDA array interface, by which torch takes the memory without a copy.
Not here: the driver's calls (`driver`), placing tensors (`memory.arena`), sharing with other processes
(`transport.cuda_ipc`).

    DeviceMemory(n)  address A --> physical memory P        a.alias()  address B --> P, too
    a.take(b)        A --> the physical memory of b; P stays with its other addresses, or is freed

30 GiB change their physical memory in 1.1 ms, where a copy within the device takes 15 ms; allocation takes as long as
cudaMalloc (benchmarks/results/h200x2_202611/sync.md). Limits, for which other memory is torch's: torch.multiprocessing
cannot share it, its storages cannot be resized, and other devices of the process reach it by copies alone. A
registration of addresses that take other memory keeps and serves the former: register an alias.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass

from penstock.cuda.driver import CudaDriver, load_driver
from penstock.errors import PenstockError


@dataclass(slots=True)
class _Room:
    """Reserved addresses, and whether physical memory is mapped there."""

    address: int
    nbytes: int
    is_mapped: bool = False


class DeviceMemory:
    """Memory of a device in one piece. Its addresses are freed when it is collected, and physical memory with its last
    address.

    Attributes:
        address: the first byte; the same for the object's life.
        nbytes: the bytes that were asked for.
        device: the number of the device.

    Args:
        of: share the physical memory of this one; None: allocate.
        driver: stands in for the CUDA driver, in tests.

    Raises:
        ConfigError: the device has no memory of this kind; see `is_available`.
        DeviceOutOfMemory: the device has no room.

    Order: physical memory is given up only after all work of the device: each change waits for it.
    """

    def __init__(
        self, nbytes: int, device: int, *, of: DeviceMemory | None = None, driver: CudaDriver | None = None
    ) -> None:
        self.nbytes = nbytes
        self.device = device
        self._driver = driver = load_driver() if driver is None else driver
        with driver.entered(device):
            unit = driver.virtual_unit(device)
            whole = -(-nbytes // unit) * unit
            self._room = room = _Room(driver.reserve(whole), whole)
            self.address = room.address
            # The process id too: a forked child inherits the finalizer, and must not unmap what its parent uses.
            freed = weakref.finalize(self, _free, os.getpid(), driver, device, room)
            # At the interpreter's exit the driver may be gone already.
            freed.atexit = False
            try:
                self._map_and_release(driver.create(whole, device) if of is None else driver.retain(of.address))
            except PenstockError:
                freed()
                raise
        _memories[self.address] = self

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """The bytes, flat: torch takes them without a copy and keeps this object alive."""
        return array_interface(self.address, self.nbytes)

    @property
    def is_mapped(self) -> bool:
        """Return whether there is physical memory behind the addresses."""
        return self._room.is_mapped

    def alias(self) -> DeviceMemory:
        """Return other addresses of the same physical memory, which keep it when this object takes other memory."""
        return DeviceMemory(self.nbytes, self.device, of=self, driver=self._driver)

    def take(self, other: DeviceMemory) -> None:
        """Have the physical memory of `other` at these addresses, in place of the present one, if there is one.

        Raises:
            DestinationError: the driver refused. The addresses have their former memory, or none, and `is_mapped` is
                False, if it refused twice.

        Order: nothing may use these addresses meanwhile, or the device fails. Waits for all work of the device.
        """
        driver, room = self._driver, self._room
        with driver.entered(self.device):
            driver.synchronize()
            old = driver.retain(self.address) if room.is_mapped else None
            try:
                new = driver.retain(other.address)
                try:
                    if room.is_mapped:
                        self._unmap()
                    self._map(new)
                except PenstockError:
                    if old is not None and not room.is_mapped:
                        self._map(old)
                    raise
                finally:
                    driver.release(new)
            finally:
                if old is not None:
                    driver.release(old)

    def unmap(self) -> None:
        """Give up the physical memory, and keep the addresses for `renew`. Idempotent. Order: as for `take`."""
        if self._room.is_mapped:
            with self._driver.entered(self.device):
                self._driver.synchronize()
                self._unmap()

    def renew(self) -> None:
        """Have new physical memory, with any bytes, at the same addresses. Idempotent. DeviceOutOfMemory: no room."""
        if not self._room.is_mapped:
            with self._driver.entered(self.device):
                self._map_and_release(self._driver.create(self._room.nbytes, self.device))

    def allow(self, device: int) -> None:
        """Let another device of this process use the addresses, until they take other memory."""
        with self._driver.entered(device):
            self._driver.allow(self.address, self._room.nbytes, device)

    def _unmap(self) -> None:
        self._driver.unmap_handle(self.address, self._room.nbytes)
        self._room.is_mapped = False

    def _map(self, handle: int) -> None:
        """Map a handle's memory, which the mapping keeps; the handle stays the caller's."""
        driver, room = self._driver, self._room
        driver.map_handle(room.address, room.nbytes, handle)
        try:
            driver.allow(room.address, room.nbytes, self.device)
        except PenstockError:
            driver.unmap_handle(room.address, room.nbytes)
            raise
        room.is_mapped = True

    def _map_and_release(self, handle: int) -> None:
        try:
            self._map(handle)
        finally:
            self._driver.release(handle)


_memories: weakref.WeakValueDictionary[int, DeviceMemory] = weakref.WeakValueDictionary()
"""All of this process, by address."""


def array_interface(address: int, nbytes: int) -> dict[str, object]:
    """Return the CUDA array interface of flat bytes, uint8 `[nbytes]`."""
    # False: not read-only. Torch refuses to take memory that is.
    return {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}


def memory_of(address: int) -> DeviceMemory | None:
    """Return the memory that starts at an address; None: it is of another kind."""
    return _memories.get(address)


def is_available(device: int, driver: CudaDriver | None = None) -> bool:
    """Return whether a device has memory of this kind, shared by file descriptors: WSL and some virtual GPUs do not."""
    return (load_driver() if driver is None else driver).has_virtual_memory(device)


def wake(device: int, driver: CudaDriver | None = None) -> None:
    """Have the driver ready to allocate and map memory of a device.

    Its first call about memory after a pause of 20 ms takes 15 to 30 ms, whatever the size; those after it do not. Call
    this in a thread, before the memory's size is known. Source: benchmarks/results/h200x2_202611/sync.md.
    """
    driver = load_driver() if driver is None else driver
    with driver.entered(device):
        if driver.has_virtual_memory(device):
            driver.release(driver.create(driver.virtual_unit(device), device))


def _free(pid: int, driver: CudaDriver, device: int, room: _Room) -> None:
    """Give the addresses back, and the physical memory if no others have it."""
    if pid != os.getpid():
        return
    try:
        with driver.entered(device):
            # Queued kernels may still use it, as they may use memory that cudaFree is given.
            if room.is_mapped:
                driver.synchronize()
            driver.unmap(room.address, room.nbytes if room.is_mapped else 0, room.nbytes)
    except PenstockError:
        # A finalizer has no caller to raise to; a device that failed reports it at the next call.
        return
    room.is_mapped = False
