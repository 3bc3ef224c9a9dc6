"""A simulated conversion against closed forms: one worker, many, a slow one, a dead one; what chance may not change."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.types import GB
from penstock_convert.plan.cluster import CLUSTERS, H200_RATES, Cluster, Rates
from penstock_convert.plan.simulate_convert import SILENCE_S, simulate_convert
from penstock_tools.picture import svg

RATES = msgspec.structs.replace(H200_RATES, quantise_gb_per_s=100.0, worker_gb_per_s=0.0, host_gb_per_s=0.0)


def cluster(gpus: int, **fields) -> Cluster:
    given = {"nvlink_gb_per_s": 400.0, "nic_gb_per_s": 50.0, "pcie_gb_per_s": 50.0}
    return Cluster(name="test", gpus_per_node=gpus, **given | fields)


def run(count: int, one: Cluster, *, rates: Rates = RATES, taken: int = GB, given: int = GB // 2, seed: int = 0):
    return simulate_convert(np.full(count, taken), np.full(count, given), one, rates, seed=seed)


def test_single_task_takes_sum_of_stage_times() -> None:
    found = run(1, cluster(1, node_storage_gb_per_s=5.0))
    assert found.predicted_s == pytest.approx(1 / 5 + 1 / 50 + 1 / 100 + 0.5 / 5)
    assert found.moved_bytes == GB + GB // 2


def test_many_tasks_take_as_long_as_slowest_stage() -> None:
    found = run(40, cluster(1, node_storage_gb_per_s=5.0))
    assert found.predicted_s == pytest.approx(40 / 5 + 1 / 50 + 1 / 100 + 0.5 / 5)
    assert found.limit_s == pytest.approx(8.0)
    assert found.bottleneck.startswith("fetch of GPU 0")
    assert [one.busy_s for one in found.stages] == pytest.approx([8.0, 0.8, 0.4, 4.0])


@pytest.mark.parametrize("workers", [2, 5, 8])
def test_workers_share_tasks_evenly(workers: int) -> None:
    found = run(40 * workers, cluster(workers))
    least_s = 40 / 50 + 1 / 100 + 0.5 / 50
    assert least_s * 0.999 <= found.predicted_s <= least_s + 1 / 50 + 1e-9  # the last may begin one more, stolen


def test_reading_speed_is_limited_by_worker_rate() -> None:
    slow = msgspec.structs.replace(RATES, worker_gb_per_s=10.0)
    assert run(80, cluster(2), rates=slow).predicted_s == pytest.approx(40 / 10, rel=0.05)
    disk = cluster(2, node_storage_gb_per_s=4.0)
    assert run(80, disk, rates=slow).predicted_s == pytest.approx(run(80, disk).predicted_s)


@pytest.mark.parametrize(("gpus", "measured_s"), [(2, 2.67), (2, 2.83), (4, 2.30)])
def test_gpu_conversion_prediction_matches_measurement(gpus: int, measured_s: float) -> None:
    count = 1100  # 68.7 GB in tasks of 128 MiB, as benchmarks/results/h200x2_202611 and h200x4_202611 have them
    h200, rates = CLUSTERS["h200"]
    taken, given = (np.full(count, int(nbytes / count)) for nbytes in (68.7e9, 35.0e9))
    found = simulate_convert(taken, given, msgspec.structs.replace(h200, gpus_per_node=gpus), rates)
    assert abs(found.off_by(measured_s=measured_s)) < 0.1


def test_worker_speed_is_limited_by_host_rate() -> None:
    bound = msgspec.structs.replace(RATES, host_gb_per_s=20.0)
    assert run(160, cluster(4), rates=bound).predicted_s == pytest.approx(160 / 20, rel=0.05)
    assert run(160, cluster(1), rates=bound).predicted_s == pytest.approx(160 / 20, rel=0.05)
    assert run(160, cluster(1)).predicted_s == pytest.approx(160 / 50, rel=0.05)


def test_all_workers_are_limited_by_shared_storage() -> None:
    alone, four = (run(400, cluster(count, storage_gb_per_s=5.0)) for count in (1, 4))
    assert four.predicted_s == pytest.approx(alone.predicted_s, rel=0.02)


def test_slow_worker_runs_fewer_tasks() -> None:
    found = run(400, cluster(4, straggler_share=0.25, straggler_slowdown=5.0))
    ideal_s = 400 / 50 / 3.2
    assert ideal_s <= found.predicted_s <= 1.1 * ideal_s


def test_tasks_of_dead_worker_are_repeated() -> None:
    one = cluster(8, failures_per_gpu_hour=5.0, node_storage_gb_per_s=1.0)
    found = run(400, one, seed=2)
    assert found.failed
    assert found.moved_bytes == 400 * (GB + GB // 2)
    assert found.predicted_s > 400.0 + SILENCE_S / 10
    with pytest.raises(PlanError, match="every worker died"):
        run(400, msgspec.structs.replace(one, gpus_per_node=1, failures_per_gpu_hour=1e5), seed=2)


def test_empty_job_is_predicted_to_take_zero_seconds() -> None:
    found = run(0, cluster(2))
    assert (found.predicted_s, found.moved_bytes, found.links) == (0.0, 0, ())
    with pytest.raises(PlanError, match="in_bytes has 2 tasks, but out_bytes has 1"):
        simulate_convert(np.ones(2, np.int64), np.ones(1, np.int64), cluster(1), RATES)


def test_conversion_diagram_shows_every_stage() -> None:
    drawn = svg(run(20, cluster(2, node_storage_gb_per_s=5.0)))
    for word in ("GPU 0 fetch", "GPU 1 send", "fetched", "placed", "sent"):
        assert word in drawn


jobs = st.tuples(st.integers(1, 60), st.integers(1, 6), st.integers(0, 9), st.sampled_from([0.0, 0.3]))


@given(jobs, st.floats(1.1, 8.0))
@settings(max_examples=30, deadline=None)
def test_equal_seeds_reproduce_conversion_prediction(given, factor: float) -> None:
    count, workers, seed, slow = given
    one = cluster(workers, straggler_share=slow, node_storage_gb_per_s=10.0)
    size = np.random.default_rng(seed).integers(GB // 2, GB, count)
    first, again = (simulate_convert(size, size // 2, one, RATES, seed=seed) for _ in range(2))
    assert first == again
    assert first.moved_bytes == int((size + size // 2).sum())
    assert first.predicted_s >= size.sum() / 10e9 * (1 - 1e-9)
    fast = msgspec.structs.replace(one, pcie_gb_per_s=50.0 * factor, node_storage_gb_per_s=10.0 * factor)
    after = simulate_convert(size, size // 2, fast, RATES, seed=seed).predicted_s
    assert after <= first.predicted_s * 1.2 + 1e-9  # greedy placement: one task may end up elsewhere
