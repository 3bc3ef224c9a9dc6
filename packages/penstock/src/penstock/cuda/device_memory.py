"""Device memory whose physical memory can be exchanged at fixed addresses, as in the flip of a staged update.

An exchange of 30 GiB takes 1.1 ms, and a copy of 30 GiB within the device takes 15 ms. Allocation takes as long as
cudaMalloc (benchmarks/results/h200x2_202611/sync.md). torch.multiprocessing cannot share this memory, its storages
cannot be resized, and other devices of the process reach it only by copies. After an exchange, a transport's
registration still refers to the old physical memory, so register an `alias`.
"""

from __future__ import annotations

import os
import weakref

import msgspec

from penstock.cuda.driver import CudaDriver, load_driver
from penstock.errors import PenstockError


class _Reservation(msgspec.Struct):
    address: int
    nbytes: int
    is_mapped: bool = False


class DeviceMemory:
    """Contiguous memory on a device. Each change of physical memory waits for all work on the device.

    Garbage collection of this object frees its addresses. Physical memory is freed with the last addresses that map it.

    Attributes:
        address: address of the first byte, which never changes.
        nbytes: the requested size in bytes.

    Args:
        of: other device memory, whose physical memory this object shares. The default is new memory.

    Raises:
        ConfigError: the device does not support this kind of memory. See `is_available`.
        DeviceOutOfMemory: the device does not have enough free memory.
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
            self._reservation = reservation = _Reservation(driver.reserve(whole), whole)
            self.address = reservation.address
            # A forked child inherits the finalizer and must not unmap memory that its parent uses.
            freed = weakref.finalize(self, _free, os.getpid(), driver, device, reservation)
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
        """Return the memory as flat bytes. A torch tensor shares the memory and keeps this object alive."""
        return array_interface(self.address, self.nbytes)

    @property
    def is_mapped(self) -> bool:
        """Return whether there is physical memory at the addresses."""
        return self._reservation.is_mapped

    def alias(self) -> DeviceMemory:
        """Map this physical memory at new addresses, which keep the memory even if this object maps other memory."""
        return DeviceMemory(self.nbytes, self.device, of=self, driver=self._driver)

    def take(self, other: DeviceMemory) -> None:
        """Map the physical memory of `other` at these addresses, in place of the current memory.

        No kernel or copy may use these addresses during the call, or the device fails. If the driver refuses
        (DestinationError), the old memory is mapped again. If no memory can be mapped, `is_mapped` is False.
        """
        driver, reservation = self._driver, self._reservation
        with driver.entered(self.device):
            driver.synchronize()
            old = driver.retain(self.address) if reservation.is_mapped else None
            try:
                new = driver.retain(other.address)
                try:
                    if reservation.is_mapped:
                        self._unmap()
                    self._map(new)
                except PenstockError:
                    if old is not None and not reservation.is_mapped:
                        self._map(old)
                    raise
                finally:
                    driver.release(new)
            finally:
                if old is not None:
                    driver.release(old)

    def unmap(self) -> None:
        """Release the physical memory and keep the addresses for `renew`. Idempotent. See `take` for restrictions."""
        if self._reservation.is_mapped:
            with self._driver.entered(self.device):
                self._driver.synchronize()
                self._unmap()

    def renew(self) -> None:
        """Map new physical memory with undefined bytes at the addresses. Idempotent. Raises DeviceOutOfMemory."""
        if not self._reservation.is_mapped:
            with self._driver.entered(self.device):
                self._map_and_release(self._driver.create(self._reservation.nbytes, self.device))

    def allow(self, device: int) -> None:
        """Let another device of this process use the addresses until different memory is mapped there."""
        with self._driver.entered(device):
            self._driver.allow(self.address, self._reservation.nbytes, device)

    def _unmap(self) -> None:
        self._driver.unmap_handle(self.address, self._reservation.nbytes)
        self._reservation.is_mapped = False

    def _map(self, handle: int) -> None:
        """Map the memory of a handle. The mapping keeps the memory alive. The caller must release the handle."""
        driver, reservation = self._driver, self._reservation
        driver.map_handle(reservation.address, reservation.nbytes, handle)
        try:
            driver.allow(reservation.address, reservation.nbytes, self.device)
        except PenstockError:
            driver.unmap_handle(reservation.address, reservation.nbytes)
            raise
        reservation.is_mapped = True

    def _map_and_release(self, handle: int) -> None:
        try:
            self._map(handle)
        finally:
            self._driver.release(handle)


_memories: weakref.WeakValueDictionary[int, DeviceMemory] = weakref.WeakValueDictionary()
"""All `DeviceMemory` of this process, by address."""


def array_interface(address: int, nbytes: int) -> dict[str, object]:
    """Return the CUDA array interface of flat bytes, uint8 `[nbytes]`."""
    # False means not read-only. Torch refuses read-only memory.
    return {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 3}


def memory_of(address: int) -> DeviceMemory | None:
    """Return the `DeviceMemory` that starts at an address, or None for memory of another kind."""
    return _memories.get(address)


def is_available(device: int, driver: CudaDriver | None = None) -> bool:
    """Return whether a device supports `DeviceMemory`. WSL and some virtual GPUs lack support."""
    return (load_driver() if driver is None else driver).has_virtual_memory(device)


def wake(device: int, driver: CudaDriver | None = None) -> None:
    """Prepare the driver to allocate and map memory on a device, in a thread before the size of the memory is known.

    After a pause of 20 ms, the driver's first memory call takes 15 to 30 ms for any size. Source:
    benchmarks/results/h200x2_202611/sync.md.
    """
    driver = load_driver() if driver is None else driver
    with driver.entered(device):
        if driver.has_virtual_memory(device):
            driver.release(driver.create(driver.virtual_unit(device), device))


def _free(pid: int, driver: CudaDriver, device: int, reservation: _Reservation) -> None:
    if pid != os.getpid():
        return
    try:
        with driver.entered(device):
            if reservation.is_mapped:
                driver.synchronize()
            driver.unmap(reservation.address, reservation.nbytes if reservation.is_mapped else 0, reservation.nbytes)
    except PenstockError:
        # A finalizer has no caller to raise to. A failed device reports its error at the next call.
        return
    reservation.is_mapped = False
