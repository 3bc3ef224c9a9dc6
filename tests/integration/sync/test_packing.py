"""Publishers pack short runs for subscribers over `http` and `nixl`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
from tests.integration.conftest import Host
from tests.integration.sync.test_faults import assert_has_version, members
from tests.integration.sync.test_sync import step

import penstock as ps
from penstock.errors import BudgetTooSmall, SourceStalled
from penstock.plan.packing import LEAST_PACK_BYTES

SIZES: dict[str, Any] = {"num_layers": 3, "rows": 2048, "columns": 256}
TRANSPORTS = ["http", pytest.param("nixl", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="no NIXL"))]


def over(transport: str, **task: Any) -> dict[str, Any]:
    return {"connection": {"transports": [transport]}, "environ": {"PENSTOCK_NIXL_TLS": "tcp"}, **SIZES, **task}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("pack_bytes", [LEAST_PACK_BYTES, "64M", 0])
def test_column_slices_arrive_with_and_without_packing(host: Host, transport: str, pack_bytes: int | str) -> None:
    publishers = host.start_ranks("publisher", 2, options={"pack_bytes": pack_bytes}, **over(transport))
    subscribers = host.start_ranks("subscriber", 2, dim=1, **over(transport))
    publishers[0].call("subscribers 2")
    for version in (1, 2):
        *got, _, _ = step(publishers, subscribers, version)
        for worker, result in zip(subscribers, got, strict=True):
            assert_has_version(worker, result, version)
            assert result["packed_bytes"] == (result["nbytes"] if pack_bytes else 0)
            expected = "packed at the sources" if pack_bytes else "has no memory to pack them"
            assert any(expected in line for line in result["why"]), result["why"]


def test_quantised_codes_and_scales_arrive_packed(host: Host) -> None:
    offered = {"transforms": {"fp8-block128": ["*"]}, "pack_bytes": "8M"}
    publishers = host.start_ranks("publisher", 2, mode="snapshot", options=offered, **over("http"))
    subscribers = host.start_ranks("subscriber", 2, dim=1, tag="fp8-block128", **over("http"))
    publishers[0].call("subscribers 2")
    *got, _, _ = step(publishers, subscribers, 1)
    for worker, result in zip(subscribers, got, strict=True):
        assert_has_version(worker, result, 1)
        # Codes are runs of 128 bytes, and each rank's scales of a tensor are runs of 4 bytes.
        assert result["packed_bytes"] == result["nbytes"] == 3 * (2048 * 128 + 16 * 4)


def test_killed_receiver_releases_packed_memory(host: Host) -> None:
    short = {"penstock.sync.packer.LEASE_S": 1.0, "penstock.sync.packer.NUM_BUFFERS": 1}
    options = {"pack_bytes": "8M"}
    publishers = host.start_ranks("publisher", 1, options=options, constants=short, **over("http"))
    often = {"penstock.sync.receive.packed.KEEP_S": 0.2}
    ranks = [
        host.start_rank("subscriber", rank=rank, world_size=2, dim=1, constants=often, **over("http", **more))
        for rank, more in enumerate(({"holds_buffer": True}, {}))
    ]
    for one in ranks:
        one.wait_for("joined")
    publishers[0].call("subscribers 2")
    publishers[0].send("publish 1")
    ranks[0].send("update")
    ranks[0].wait_for("holding")
    ranks[1].send("update")
    with pytest.raises(SourceStalled):  # the wait lasts as long as the holder lives
        ranks[1].result("update", timeout_s=3.0)
    ranks[0].kill()
    result = ranks[1].result("update")
    assert_has_version(ranks[1], result, 1)
    assert result["packed_bytes"] == result["nbytes"]
    outcome = publishers[0].result("publish 1")
    assert set(outcome["committed"]) == members(ranks[1:]) and set(outcome["failed"]) == members(ranks[:1])


def test_too_small_pack_memory_raises_budget_too_small() -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        ps.publisher("policy", {}, settings=ps.sync.PublisherSettings(pack_bytes=1000))
    assert caught.value.minimum_bytes == LEAST_PACK_BYTES
    assert caught.value.hint == f"set pack_bytes >= {LEAST_PACK_BYTES}"
