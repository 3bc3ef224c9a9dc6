"""Trainer ranks quantise shards that cross blocks. Receivers get the bits of the quantised unsliced tensor."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tests.integration.conftest import Host
from tests.integration.sync.test_faults import assert_has_version, members
from tests.integration.sync.test_sync import step
from tests.support.sync import SyncWorker

TAG = "fp8-block128"
SHAPE: dict[str, Any] = {"num_layers": 3, "rows": 300, "columns": 256}
"""Three ranks with shards of 100 rows, and blocks of rows [0, 128), [128, 256) and [256, 300)."""


def publishers(host: Host, count: int = 3, **task: Any) -> list[SyncWorker]:
    options = {"transforms": {TAG: ["*"]}, **task.pop("options", {})}
    return host.start_ranks("publisher", count, options=options, **SHAPE, **task)


def subscribers(host: Host, count: int = 2, **task: Any) -> list[SyncWorker]:
    return host.start_ranks("subscriber", count, tag=TAG, **SHAPE, **task)


@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize(("source", "keep_plain"), [("live", True), ("snapshot", True), ("snapshot", False)])
def test_each_version_matches_unsharded_quantised_model(host: Host, source: str, keep_plain: bool, mode: str) -> None:
    mine = publishers(host, mode=source, options={"keep_plain": keep_plain})
    theirs = subscribers(host, mode=mode)
    plain = host.start_ranks("subscriber", 1, **SHAPE) if keep_plain else []
    mine[0].call(f"subscribers {2 + len(plain)}")
    for version in (1, 2, 5):
        results = step(mine, theirs + plain, version)
        for worker, one in zip(theirs + plain, results, strict=False):
            assert_has_version(worker, one, version)
        published = results[-3:]
        assert not any("error" in one for one in published), published
        # Rows [100, 128) and [200, 256) of each layer, in BF16.
        assert [one["exchanged"] for one in published] == [28 * 512 * 3, 56 * 512 * 3, 0]
        assert sum(one["transformed"] for one in published) >= 3 * 300 * 256
        if source == "live":
            assert set(published[0]["committed"]) == members(theirs + plain)


@pytest.mark.parametrize("source", ["live", "snapshot"])
def test_shards_within_one_block_are_quantised_together(host: Host, source: str) -> None:
    """The second and fourth of five ranks begin no block, so they send elements only to other ranks."""
    mine = publishers(host, 5, mode=source, options={"keep_plain": False})
    theirs = subscribers(host)
    mine[0].call("subscribers 2")
    for version in (1, 2):
        results = step(mine, theirs, version)
        for worker, one in zip(theirs, results, strict=False):
            assert_has_version(worker, one, version)
        # Ranks read rows [60, 128), rows [180, 256), or no rows of each layer.
        assert [one["exchanged"] for one in results[2:]] == [68 * 512 * 3, 0, 76 * 512 * 3, 0, 0]
        assert [one["transformed"] > 0 for one in results[2:]] == [True, False, True, False, True]


def test_float32_master_weights_are_cast_to_bfloat16(host: Host) -> None:
    shape = SHAPE | {"dtype": "float32"}
    mine = host.start_ranks("publisher", 2, options={"transforms": "cast:BF16"}, **shape)
    theirs = host.start_ranks("subscriber", 2, dim=1, tag="cast:BF16", **shape)
    mine[0].call("subscribers 2")
    *got, zero, one = step(mine, theirs, 1)
    for worker, result in zip(theirs, got, strict=True):
        assert_has_version(worker, result, 1)
        assert result["nbytes"] == 3 * 300 * 256
    assert zero["exchanged"] == one["exchanged"] == 0


def test_requesting_unpublished_format_raises_plan_error(host: Host) -> None:
    mine = publishers(host, 1, mode="snapshot")
    other = host.start_ranks("subscriber", 1, tag="fp8-channel", **SHAPE)
    mine[0].call("publish 1")
    result = other[0].call("update")
    assert result["error"] == "PlanError"
    assert TAG in result["message"]


@pytest.mark.parametrize("source", ["live", "snapshot"])
@pytest.mark.parametrize("lost", [0, 1])
def test_rank_killed_during_exchange_fails_version(host: Host, source: str, lost: int) -> None:
    """Rank 1 requests elements from rank 2, and rank 0 from rank 1. The requested rank hangs and is killed."""
    mine = [
        host.start_rank(
            "publisher",
            rank=rank,
            world_size=3,
            mode=source,
            options={"transforms": {TAG: ["*"]}},
            pause_s=60.0 if rank == lost + 1 else 0.0,
            **SHAPE,
        )
        for rank in range(3)
    ]
    for one in mine:
        one.wait_for("joined")
    theirs = subscribers(host)
    before = [one.call("digests")["digests"] for one in theirs]
    mine[0].call("subscribers 2")
    for one in mine:
        one.send("publish 1")
    for one in theirs:
        one.send("update")
    time.sleep(2.0)
    mine[lost + 1].kill()
    for rank in {0, 1, 2} - {lost + 1}:
        result = mine[rank].result("publish 1")
        assert result["error"] == "PeerLost", result
    for worker, old in zip(theirs, before, strict=True):
        result = worker.result("update")
        assert "error" in result, result
        assert not result["mutated"]
        now = worker.call("digests")
        assert (now["version"], now["is_dirty"], now["digests"]) == (-1, False, old)
