"""Device memory with separate addresses and physical memory, on a fake driver with host memory."""

from __future__ import annotations

import ctypes
import gc

import pytest
from tests.support.fake_cuda import UNIT_BYTES, FakeCuda

from penstock.cuda.device_memory import DeviceMemory, memory_of, wake
from penstock.errors import DestinationError, DeviceOutOfMemory

NBYTES = UNIT_BYTES + 100


def make_memory(driver: FakeCuda, text: bytes) -> DeviceMemory:
    memory = DeviceMemory(NBYTES, 0, driver=driver)
    write(memory, text)
    return memory


def write(memory: DeviceMemory, text: bytes) -> None:
    ctypes.memmove(memory.address, text, len(text))


def read(memory: DeviceMemory) -> bytes:
    return ctypes.string_at(memory.address, 5)


def test_alias_shares_bytes_at_new_address() -> None:
    driver = FakeCuda()
    memory = make_memory(driver, b"first")
    alias = memory.alias()
    assert alias.address != memory.address
    assert read(alias) == b"first"
    write(alias, b"other")
    assert read(memory) == b"other"
    assert memory_of(alias.address) is alias
    assert memory_of(alias.address + 1) is None


def test_exchange_swaps_memory_and_keeps_addresses() -> None:
    driver = FakeCuda()
    live, staged = make_memory(driver, b"old  "), make_memory(driver, b"new  ")
    former = live.alias()
    address = live.address
    live.take(staged)
    assert live.address == address
    assert (read(live), read(staged), read(former)) == (b"new  ", b"new  ", b"old  ")
    write(former, b"next ")
    live.take(former)
    assert (read(live), read(staged)) == (b"next ", b"new  ")
    # It waited for the device before each exchange, and leaked no handle.
    assert (driver.num_waits, driver.num_handles) == (2, 0)


def test_refused_exchange_keeps_original_memory() -> None:
    driver = FakeCuda()
    live, staged = make_memory(driver, b"old  "), make_memory(driver, b"new  ")
    driver.refuses = "allow"
    with pytest.raises(DestinationError):
        live.take(staged)
    assert (live.is_mapped, read(live), read(staged), driver.num_handles) == (True, b"old  ", b"new  ", 0)


def test_unmapped_memory_is_remapped_at_same_address() -> None:
    driver = FakeCuda()
    memory = make_memory(driver, b"first")
    address = memory.address
    memory.unmap()
    memory.unmap()
    assert not memory.is_mapped
    memory.renew()
    memory.renew()
    assert (memory.address, read(memory)) == (address, bytes(5))
    driver.most_bytes = NBYTES - 1
    memory.unmap()
    with pytest.raises(DeviceOutOfMemory):
        memory.renew()
    driver.most_bytes = 1 << 30
    memory.renew()
    write(memory, b"again")


def test_dropping_last_reference_frees_addresses() -> None:
    driver = FakeCuda()
    driver.most_bytes = UNIT_BYTES
    with pytest.raises(DeviceOutOfMemory):
        DeviceMemory(NBYTES, 0, driver=driver)
    gc.collect()
    assert driver.num_opened == 0
    driver.most_bytes = 1 << 30
    memory = make_memory(driver, b"first")
    address, alias = memory.address, memory.alias()
    del memory
    gc.collect()
    assert memory_of(address) is None
    assert read(alias) == b"first"
    alias.unmap()
    del alias
    gc.collect()
    assert (driver.num_opened, driver.num_handles) == (0, 0)


def test_driver_warm_up_leaks_no_memory() -> None:
    driver = FakeCuda()
    wake(0, driver)
    assert (driver.num_opened, driver.num_handles) == (0, 0)
    driver.most_bytes = 0
    with pytest.raises(DeviceOutOfMemory):
        wake(0, driver)
