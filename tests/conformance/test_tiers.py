"""Every `Tier` in host memory and on disk passes the conformance suite. tests/gpu tests a device's tier."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.heap_tier import HeapTier
from tests.support.tier_suite import TierTests

from penstock.cache.tier_disk import SpillTier
from penstock.memory.tier import Tier
from penstock.memory.tier_host import ArenaTier, PoolTier


class TestHeap(TierTests):
    def make(self) -> Tier:
        return HeapTier()


class TestArena(TierTests):
    def make(self) -> Tier:
        return ArenaTier()


class TestPool(TierTests):
    def make(self) -> Tier:
        return PoolTier.open(256 << 20, registrar=None, stall_s=5.0)


class TestSpill(TierTests):
    @pytest.fixture(autouse=True)
    def directory(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make(self) -> Tier:
        return SpillTier.open(self.path / "spill")
