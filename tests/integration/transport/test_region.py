"""A peer's memory that is mapped and used directly, on the host and on a fake device."""

from __future__ import annotations

import ctypes
import gc

import pytest
from tests.support.fake_cuda import FakeCuda
from tests.support.holder import HolderProcess, pattern

from penstock.errors import ConfigError, PeerLost, StaleDescriptor
from penstock.transport.mapped_region import map_region
from penstock.transport.protocol import Descriptor

NBYTES = 3_000_011


@pytest.mark.parametrize("kind", ["shm", "fake_cuda", "fake_virtual"])
def test_mapped_region_contains_peer_memory(kind: str) -> None:
    driver = FakeCuda()
    with HolderProcess(kind, nbytes=NBYTES) as holder:
        region = map_region(holder.descriptor, device=0, driver=driver)
        assert region.device == ("cpu" if kind == "shm" else "cuda:0")
        assert region.nbytes == NBYTES
        assert ctypes.string_at(region.address, NBYTES) == pattern(NBYTES)
        region.check()
        holder.fence(2)
        with pytest.raises(StaleDescriptor):
            region.check()
        assert ctypes.string_at(region.address, NBYTES) == pattern(NBYTES, 2)
        with pytest.raises(StaleDescriptor):
            old = Descriptor(**{name: getattr(holder.descriptor, name) for name in Descriptor.__struct_fields__})
            holder.fence(3)
            map_region(old, device=0, driver=driver)
        holder.process.kill()
        holder.process.wait(timeout=30)
        with pytest.raises(PeerLost):
            region.check()
        assert ctypes.string_at(region.address, NBYTES) == pattern(NBYTES, 3)  # mapped memory outlives its owner
    assert driver.num_opened == (0 if kind == "shm" else 1)
    del region
    gc.collect()
    assert driver.num_opened == 0


def test_mapping_over_unsupported_transport_is_rejected() -> None:
    with pytest.raises(ConfigError, match="cannot be mapped"):
        map_region(Descriptor(transport="http", endpoint="e", generation=1, nbytes=1))
