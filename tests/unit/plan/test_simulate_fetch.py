"""A simulated fetch is compared with estimates of copies, hops and storage, and must not depend on chance."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.fetcher import assignment, upstream
from penstock.plan.schedule import CHUNK_BYTES
from penstock.types import GB
from penstock_convert.plan.cluster import CLUSTERS, H200_RATES, Cluster, Rates
from penstock_hub.relay_parents import CHUNKS_A_HOP
from penstock_tools import simulate_fetch as module
from penstock_tools.simulate_fetch import SimulatedFleet, simulate_fetch, step_bytes

RATES = H200_RATES
NBYTES = 50 * GB


def cluster(nodes: int, gpus: int = 1, **fields) -> Cluster:
    given = {"nvlink_gb_per_s": 400.0, "nic_gb_per_s": 50.0, "pcie_gb_per_s": 55.0, "nics_per_node": gpus}
    return Cluster(name="test", num_nodes=nodes, gpus_per_node=gpus, **given | fields)


def digest_s(rates: Rates, gb_per_s: float) -> float:
    """Return the digest time of one step."""
    return float(step_bytes(np.array(gb_per_s * 1e9))) / GB / rates.digest_gb_per_s + rates.step_s


def hop_s(rates: Rates, gb_per_s: float) -> float:
    """Return the time between a verified step at a relay and the same verified step at its child."""
    return rates.hop_s + float(step_bytes(np.array(gb_per_s * 1e9))) / GB / gb_per_s + digest_s(rates, gb_per_s)


def chunk_hop_s(rates: Rates, gb_per_s: float) -> float:
    """Return the time of a hop in a ring, where storage sets the pace."""
    return rates.hop_s + CHUNK_BYTES / GB * (1 / gb_per_s + 1 / rates.digest_gb_per_s) + rates.step_s


def first_s(rates: Rates, gb_per_s: float) -> float:
    """Return the time that the first receiver needs in addition to its bytes."""
    return rates.hop_s + digest_s(rates, gb_per_s)


def near(value: float, copies: float = 1.0) -> object:
    return pytest.approx(value, abs=copies * NBYTES / 50e9 / 500)


def test_single_receiver_prediction_equals_one_copy_time() -> None:
    found = simulate_fetch(SimulatedFleet(nbytes=NBYTES), cluster(2), RATES)
    assert found.predicted_s == near(1.0 + first_s(RATES, 50))
    assert found.limit_s == pytest.approx(1.0)
    assert found.moved_bytes == NBYTES


@pytest.mark.parametrize("nodes", [3, 8])
def test_chain_prediction_adds_one_hop_per_node(nodes: int) -> None:
    found = simulate_fetch(SimulatedFleet(nbytes=NBYTES), cluster(nodes), RATES)
    assert found.predicted_s == near(1.0 + first_s(RATES, 50) + (nodes - 2) * hop_s(RATES, 50))
    assert found.moved_bytes == (nodes - 1) * NBYTES


def test_simulated_copy_within_node_uses_nvlink() -> None:
    found = simulate_fetch(SimulatedFleet(nbytes=NBYTES), cluster(1, 8), RATES)
    assert found.predicted_s == pytest.approx(NBYTES / 400e9 + first_s(RATES, 400) + 6 * hop_s(RATES, 400), rel=0.02)
    assert {load.name for load in found.links} == {"nvlink out", "nvlink in"}


def test_several_holders_send_in_parallel() -> None:
    alone = simulate_fetch(SimulatedFleet(nbytes=NBYTES), cluster(20), RATES)
    four = simulate_fetch(SimulatedFleet(nbytes=NBYTES, holders=4), cluster(20), RATES)
    assert four.predicted_s < alone.predicted_s
    assert four.num_receivers == 16


def test_shards_of_replica_are_sent_in_parallel() -> None:
    found = simulate_fetch(SimulatedFleet(nbytes=8 * NBYTES, parts=8), cluster(2, 8), RATES)
    assert found.predicted_s == near(1.0 + first_s(RATES, 50))
    assert found.moved_bytes == 8 * NBYTES


def test_simulated_fleet_without_holder_reads_storage_once() -> None:
    one = cluster(4, node_storage_gb_per_s=2.0)
    found = simulate_fetch(SimulatedFleet(nbytes=NBYTES, holders=0), one, RATES)
    storage = next(load for load in found.links if load.name == "storage of a node")
    assert storage.total_bytes == pytest.approx(NBYTES, rel=1e-6)
    assert found.predicted_s == pytest.approx(NBYTES / 8e9 + 3 * chunk_hop_s(RATES, 50), rel=0.01)


def test_slow_member_slows_its_descendants() -> None:
    slow = cluster(20, straggler_share=0.1, straggler_slowdown=4.0)
    found = simulate_fetch(SimulatedFleet(nbytes=NBYTES), slow, RATES, seed=1)
    assert found.predicted_s > 3.5


def test_simulated_dead_members_are_bypassed() -> None:
    one = msgspec.structs.replace(cluster(40), failures_per_gpu_hour=400.0)
    found = simulate_fetch(SimulatedFleet(nbytes=NBYTES), one, RATES, seed=3)
    assert found.failed
    assert found.num_receivers == 39 - len(found.failed)
    assert found.moved_bytes == found.num_receivers * NBYTES
    assert found.predicted_s > 1.0


def test_fleet_without_any_source_raises_plan_error() -> None:
    with pytest.raises(PlanError, match="no storage"):
        simulate_fetch(SimulatedFleet(nbytes=NBYTES, holders=0), cluster(4), RATES)
    with pytest.raises(PlanError, match="replicas of 3"):
        simulate_fetch(SimulatedFleet(nbytes=NBYTES, parts=3), cluster(4), RATES)
    with pytest.raises(PlanError, match="5 holders"):
        simulate_fetch(SimulatedFleet(nbytes=NBYTES, holders=5), cluster(4), RATES)


fleets = st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 4]), st.integers(0, 9), st.sampled_from([0.0, 0.2]))


@given(fleets)
@settings(max_examples=25, deadline=None)
def test_equal_seeds_reproduce_fetch_prediction(given) -> None:
    nodes, gpus, seed, slow = given
    one = cluster(nodes, gpus, straggler_share=slow)
    first, again = (simulate_fetch(SimulatedFleet(nbytes=NBYTES), one, RATES, seed=seed) for _ in range(2))
    assert first == again
    assert first.moved_bytes == (one.num_gpus - 1) * NBYTES
    assert first.predicted_s >= first.limit_s * (1 - 1e-6)


@given(fleets, st.floats(1.1, 8.0))
@settings(max_examples=25, deadline=None)
def test_faster_links_never_increase_predicted_time(given, factor: float) -> None:
    nodes, gpus, seed, slow = given
    one = cluster(nodes, gpus, straggler_share=slow)
    fast = msgspec.structs.replace(
        one, nic_gb_per_s=one.nic_gb_per_s * factor, nvlink_gb_per_s=one.nvlink_gb_per_s * factor
    )
    before, after = (
        simulate_fetch(SimulatedFleet(nbytes=NBYTES), each, RATES, seed=seed).predicted_s for each in (one, fast)
    )
    assert after <= before * 1.01


def test_thousand_nodes_are_simulated() -> None:
    found = simulate_fetch(SimulatedFleet(nbytes=8 * NBYTES, parts=8), cluster(1024, 8), RATES)
    assert found.num_receivers == 8184
    assert found.moved_bytes == 1023 * 8 * NBYTES
    # Each host has one member with the key. There are two trees, because chains of hosts take more than two copies.
    assert "2 trees" in found.what and found.predicted_s < 1.2


@pytest.mark.parametrize(("gpus", "nics"), [(1, 1), (8, 1), (8, 4)])
def test_fetch_to_many_hosts_takes_about_one_copy_time(gpus: int, nics: int) -> None:
    found = simulate_fetch(SimulatedFleet(nbytes=2 * NBYTES), cluster(200, gpus, nics_per_node=nics), RATES)
    assert found.moved_bytes == 2 * NBYTES * (200 * gpus - 1)
    assert found.predicted_s < 1.2 * 2.0
    most = max(load.most_bytes for load in found.links if load.name == "nic out")
    assert most == pytest.approx(2 * NBYTES, rel=1e-6)


def test_dead_members_in_two_trees_are_bypassed() -> None:
    one = msgspec.structs.replace(cluster(100), failures_per_gpu_hour=200.0)
    found = simulate_fetch(SimulatedFleet(nbytes=NBYTES), one, RATES, seed=3)
    assert "2 trees" in found.what and found.failed
    assert found.num_receivers == 99 - len(found.failed)
    assert found.moved_bytes == found.num_receivers * NBYTES


def test_prediction_matches_fetch_measured_on_h200() -> None:
    """Three receivers on four H200, from which no rate was taken. Source: results/h200x4_202611/fetch.md, payload."""
    host = msgspec.structs.replace(CLUSTERS["h200"][0], num_nodes=1, gpus_per_node=4)
    found = simulate_fetch(SimulatedFleet(nbytes=60 * GB), host, RATES)
    assert abs(found.off_by(measured_s=0.187)) < 0.1


def test_relay_hop_cost_matches_simulation() -> None:
    assert pytest.approx(hop_s(RATES, 50) / (CHUNK_BYTES / 50e9), abs=1) == CHUNKS_A_HOP


def test_simulation_constants_match_fetch_constants() -> None:
    assert (module.READS_OF_ONE, module.STEP_S) == (assignment.READS_OF_ONE, upstream.STEP_S)
    assert (module.MAX_STEP_CHUNKS, module.PATIENCE_S) == (upstream.MAX_STEP_CHUNKS, upstream.PATIENCE_S)
