"""A simulated sync is compared with estimates, the planned bytes, and the steps of a real receiver."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan.layout import Form, Layout
from penstock.plan.sync import AHEAD_WINDOWS, NEAR_READS, READS_OF_ONE, SyncPlan, plan_sync
from penstock.types import GB, MIB, Box, DType
from penstock_convert.plan.cluster import CLUSTERS, Cluster, Rates
from penstock_tools.links import fair_rates
from penstock_tools.machine import slowed
from penstock_tools.picture import svg
from penstock_tools.shapes import kimi_k2, receiver_layouts, shape_of, trainer_layouts
from penstock_tools.simulate_sync import BATCH_BYTES, StageWork, queued, simulate_sync, transformed_bytes

ROWS = 1024
FREE = Rates(
    name="free",
    quantise_gb_per_s=1e9,
    digest_gb_per_s=1e9,
    device_copy_gb_per_s=1e9,
    step_s=0.0,
    post_s=0.0,
    run_s=0.0,
    short_run_s=0.0,
    answer_s=0.0,
    hop_s=0.0,
)
CLUSTER = Cluster(name="test", gpus_per_node=1, nics_per_node=1, nvlink_gb_per_s=400, nic_gb_per_s=50, pcie_gb_per_s=55)


def layout(member: str, names: list[str], start: int = 0, stop: int = ROWS) -> Layout:
    shape = (ROWS, 1 << 16)
    form = Form(dtype=DType.U8, shape=shape, box=Box(start=(start, 0), stop=(stop, 1 << 16)))
    each = form.span_bytes
    return Layout(
        member=member,
        regions=(each * len(names),),
        forms=(form,),
        names=tuple(names),
        form=np.zeros(len(names), np.int64),
        offset=np.arange(len(names)) * each,
    )


NAMES = [f"layers.{i}.w" for i in range(16)]
NBYTES = 16 * ROWS << 16


def plan(sources: int, receivers: int, *, bucket_bytes: int = 64 * MIB) -> SyncPlan:
    step = ROWS // sources
    held = [layout(f"s{i}", NAMES, i * step, (i + 1) * step) for i in range(sources)]
    return plan_sync(held, [layout(f"r{i}", NAMES) for i in range(receivers)], bucket_bytes=bucket_bytes)


def near(seconds: float) -> object:
    return pytest.approx(seconds, rel=0.02)


def test_one_to_one_prediction_equals_wire_time() -> None:
    found = simulate_sync(plan(1, 1), CLUSTER, FREE)
    assert found.predicted_s == near(NBYTES / 50e9)
    assert found.limit_s == pytest.approx(NBYTES / 50e9)
    assert "nic" in found.bottleneck


def test_two_receivers_share_one_source_link() -> None:
    found = simulate_sync(plan(1, 2), CLUSTER, FREE)
    assert found.predicted_s == near(2 * NBYTES / 50e9)
    assert found.first_s == near(2 * NBYTES / 50e9)


def test_two_sources_saturate_one_receiver_link() -> None:
    assert simulate_sync(plan(2, 1), CLUSTER, FREE).predicted_s == near(NBYTES / 50e9)


def test_four_to_four_time_matches_one_to_one() -> None:
    assert simulate_sync(plan(4, 4), CLUSTER, FREE).predicted_s == pytest.approx(NBYTES / 50e9, rel=0.1)


def test_simulated_ranks_on_node_use_nvlink() -> None:
    one = msgspec.structs.replace(CLUSTER, gpus_per_node=8, nics_per_node=8)
    found = simulate_sync(plan(2, 2), one, FREE, one_node=True)
    assert found.predicted_s == near(NBYTES / 400e9)
    assert {load.name for load in found.links} == {"nvlink out", "nvlink in"}
    assert simulate_sync(plan(2, 2), one, FREE).predicted_s == near(NBYTES / 50e9)


def test_transform_and_flip_time_is_added_to_prediction() -> None:
    rates = msgspec.structs.replace(FREE, quantise_gb_per_s=200.0, device_copy_gb_per_s=1.0)
    one = plan(1, 1)
    source = np.full((1, one.num_buckets), 2 * GB)  # One or two batches each.
    found = simulate_sync(one, CLUSTER, rates, transformed=source, staged=False)
    whole_s = one.num_buckets * 0.01
    assert found.predicted_s == pytest.approx(whole_s + StageWork.of(one, rates).nbytes[-1] / 50e9, rel=0.05)
    assert found.bottleneck.startswith("transform")
    staged = simulate_sync(one, CLUSTER, rates, transformed=source)
    assert staged.predicted_s == pytest.approx(found.predicted_s + NBYTES / 1e9)
    exchanged = simulate_sync(one, CLUSTER, rates, transformed=source, in_arenas=True)
    assert exchanged.predicted_s == pytest.approx(found.predicted_s + NBYTES / rates.exchange_gb_per_s / 1e9)


def test_simulated_reads_are_posted_one_by_one() -> None:
    rates = msgspec.structs.replace(FREE, post_s=0.5)
    one = plan(4, 2)
    reads = len(StageWork.of(one, rates).receiver) // 2
    found = simulate_sync(one, CLUSTER, rates)
    assert found.predicted_s == pytest.approx(reads * 0.5, rel=0.1)
    assert found.bottleneck.startswith("posting reads")


NODE = msgspec.structs.replace(CLUSTER, gpus_per_node=8, nics_per_node=8)


def columns(sources: int) -> SyncPlan:
    """Return two receivers of half of the columns of every tensor, in runs of 32 KiB."""
    step, half = ROWS // sources, 1 << 15
    held = [layout(f"s{i}", NAMES, i * step, (i + 1) * step) for i in range(sources)]
    form = Form(dtype=DType.U8, shape=(ROWS, 2 * half), box=Box(start=(0, 0), stop=(ROWS, half)))
    wants = [
        Layout(
            member=f"r{i}",
            regions=(ROWS * half * len(NAMES),),
            forms=(form,),
            names=tuple(NAMES),
            form=np.zeros(len(NAMES), np.int64),
            offset=np.arange(len(NAMES)) * ROWS * half,
        )
        for i in range(2)
    ]
    return plan_sync(held, wants)


def test_prediction_within_node_includes_host_time_per_copy() -> None:
    one = plan(2, 1)  # A read of 512 MiB from each source has 16 copies.
    work = StageWork.of(one, FREE)
    assert work.num_copies.tolist() == [16, 16] and work.short_bytes.tolist() == [0, 0]
    slow = msgspec.structs.replace(FREE, copy_s=0.01, near_post_s=0.1)
    found = simulate_sync(one, NODE, slow, one_node=True, staged=False)
    posts = next(stage for stage in found.stages if stage.name == "posting reads")
    assert posts.busy_s == pytest.approx(2 * 0.1 + 32 * 0.01)
    idle = msgspec.structs.replace(FREE, gap_s=1e-3)
    found = simulate_sync(one, NODE, idle, one_node=True, staged=False)
    assert found.predicted_s == near(NBYTES / 400e9 + 32e-3)
    assert found.moved_bytes == NBYTES and found.limit_s == pytest.approx(NBYTES / 400e9)
    apart = simulate_sync(one, CLUSTER, msgspec.structs.replace(idle, copy_s=0.01, near_post_s=0.1), staged=False)
    assert apart.predicted_s == near(NBYTES / 50e9)


@pytest.mark.parametrize(("cluster", "expected"), [(NODE, NEAR_READS), (CLUSTER, 4 * READS_OF_ONE)])
def test_two_reads_within_node_run_concurrently(cluster: Cluster, expected: int, monkeypatch) -> None:
    most = 0

    def counted(links: np.ndarray, capacity: np.ndarray) -> np.ndarray:
        nonlocal most
        most = max(most, int(np.bincount(links[:, 1]).max()))
        return fair_rates(links, capacity)

    monkeypatch.setattr("penstock_tools.simulate_sync.fair_rates", counted)
    one = plan(4, 2)
    found = simulate_sync(one, cluster, FREE, watermark_bytes=256 * MIB, one_node=True, staged=False)
    assert most == expected and found.moved_bytes == one.nbytes


def test_receivers_on_node_use_separate_links() -> None:
    found = simulate_sync(plan(2, 2), NODE, FREE, one_node=True, staged=False)
    assert found.predicted_s == near(NBYTES / 400e9)
    # Three receivers read two sources, so each source has one or two readers.
    found = simulate_sync(plan(2, 3), NODE, FREE, one_node=True, staged=False)
    assert found.predicted_s == near(3 * NBYTES / 2 / 400e9)


def test_read_waiting_for_rows_blocks_no_other_read() -> None:
    one = plan(4, 1)
    rates = msgspec.structs.replace(FREE, quantise_gb_per_s=1.0)
    slow = np.zeros((4, one.num_buckets), np.int64)
    slow[:2, -1] = GB  # Two of the four are ready after a second.
    node = msgspec.structs.replace(NODE, nvlink_gb_per_s=1.0)
    found = simulate_sync(one, node, rates, transformed=slow, one_node=True, staged=False)
    assert found.predicted_s == near(1.0 + NBYTES / 2 / 1e9)


def test_digest_requests_delay_transform() -> None:
    one = plan(1, 1)
    rates = msgspec.structs.replace(FREE, quantise_gb_per_s=2.0, digest_gb_per_s=NBYTES / GB)
    last = np.zeros((1, one.num_buckets), np.int64)
    last[0, -1] = 2 * GB
    found = simulate_sync(one, NODE, rates, transformed=last, watermark_bytes=1024 * MIB, one_node=True, staged=False)
    # The transform, most digests, and the last step's digests take a second each.
    assert found.predicted_s == pytest.approx(2.0 + 1 / 16, rel=0.05)


def test_short_runs_within_node_use_gather_kernel() -> None:
    one = columns(1)
    work = StageWork.of(one, FREE)
    assert not work.num_copies.any() and work.short_bytes.tolist() == work.nbytes.tolist()
    slow = msgspec.structs.replace(FREE, gather_gb_per_s=200.0)
    assert simulate_sync(one, NODE, slow, one_node=True).predicted_s == near(NBYTES / 200e9)
    begun = msgspec.structs.replace(FREE, gather_s=0.1)
    found = simulate_sync(one, NODE, begun, one_node=True)
    posts = next(stage for stage in found.stages if stage.name == "posting reads")
    assert posts.busy_s == pytest.approx(0.1 * NBYTES / 2 / (256 * MIB))


SLOW_RUNS = msgspec.structs.replace(FREE, short_run_s=1e-3, run_s=1e-3)


def of_box(member: str, shape: tuple[int, int], start: tuple[int, int], stop: tuple[int, int]) -> Layout:
    form = Form(dtype=DType.U8, shape=shape, box=Box(start=start, stop=stop))
    return Layout(
        member=member,
        regions=(form.span_bytes,),
        forms=(form,),
        names=("w",),
        form=np.zeros(1, np.int64),
        offset=np.zeros(1, np.int64),
    )


def narrow_columns(num_rows: int, num_receivers: int) -> SyncPlan:
    """Return receivers of at most an eighth of one tensor, in runs of 256 bytes of each row."""
    shape = (num_rows, 256 * max(8, num_receivers))
    held = [of_box("s0", shape, (0, 0), shape)]
    return plan_sync(
        held, [of_box(f"r{i}", shape, (0, 256 * i), (num_rows, 256 * (i + 1))) for i in range(num_receivers)]
    )


def test_short_runs_between_nodes_are_packed() -> None:
    one = narrow_columns(1 << 20, 1)  # 256 MiB are a million runs, or four buffers.
    assert simulate_sync(one, CLUSTER, SLOW_RUNS, staged=False).predicted_s == near(1e-3 * (1 << 20))
    packing = msgspec.structs.replace(SLOW_RUNS, pack_gb_per_s=100.0)
    work = StageWork.of(one, packing)
    assert work.packed_bytes.tolist() == work.nbytes.tolist() == [256 * MIB] and not work.far_s.any()
    found = simulate_sync(one, CLUSTER, packing, staged=False)
    # Buffers are packed and read one after the other, each as one run instead of a million.
    assert found.predicted_s == near(256 * MIB / 100e9 + 256 * MIB / 50e9 + 1e-3)
    assert found.moved_bytes == one.nbytes
    waits = msgspec.structs.replace(packing, answer_s=0.1, post_s=0.2)
    found = simulate_sync(one, CLUSTER, waits, staged=False)
    # The requests are the part and maps, each buffer and its read, the read itself, and the acknowledgement.
    assert found.predicted_s == near(0.2 + 4 * (0.1 + 0.2) + 0.2 + 0.1)
    posts = next(stage for stage in found.stages if stage.name == "posting reads")
    assert posts.busy_s == pytest.approx(0.2 * 5 + 1e-3)


def test_simulated_receivers_wait_for_free_source_buffers() -> None:
    one = narrow_columns(4096, 32)
    rates = msgspec.structs.replace(FREE, pack_gb_per_s=1e9, answer_s=0.1)
    found = simulate_sync(one, CLUSTER, rates, staged=False)
    # 32 reads of a buffer each run eight at a time. Each needs a request for the buffer and its release.
    assert found.predicted_s == pytest.approx(0.2 + 4 * 0.2, abs=0.15)
    assert found.moved_bytes == one.nbytes


def test_long_or_local_runs_are_not_packed() -> None:
    rates = msgspec.structs.replace(FREE, pack_gb_per_s=1e-3)
    assert simulate_sync(narrow_columns(1 << 20, 1), NODE, rates, one_node=True, staged=False).predicted_s < 0.1
    assert not StageWork.of(columns(1), rates).packed_bytes.any()  # Runs of 32 KiB.
    assert not StageWork.of(plan(2, 2), rates).packed_bytes.any()


def test_simulated_python_work_is_serial() -> None:
    rates = msgspec.structs.replace(FREE, post_s=0.5, step_s=0.5)
    one = plan(4, 1)
    reads = len(StageWork.of(one, rates).receiver)
    assert simulate_sync(one, CLUSTER, rates, staged=False).predicted_s == pytest.approx(reads * 1.0, rel=0.1)


def test_simulated_update_includes_request_and_report_time() -> None:
    rates = msgspec.structs.replace(FREE, answer_s=0.1)
    found = simulate_sync(plan(1, 1), CLUSTER, rates, staged=False)
    # The requests are the part and maps, the digests during the reads, and the acknowledgement.
    assert found.predicted_s == pytest.approx(0.4)
    wire = msgspec.structs.replace(CLUSTER, nic_gb_per_s=1.0)
    assert simulate_sync(plan(1, 1), wire, rates, staged=False).predicted_s == near(NBYTES / 1e9 + 0.3)


def test_source_computes_digests_for_receivers_sequentially() -> None:
    rates = msgspec.structs.replace(FREE, digest_gb_per_s=NBYTES / GB)
    found = simulate_sync(plan(1, 2), CLUSTER, rates, staged=False)
    assert found.first_s == pytest.approx(2.0, rel=0.05)  # One second there, and one here.
    assert found.predicted_s == pytest.approx(3.0, rel=0.05)


def measured_model(kind: str, num_trainers: int) -> tuple[list[Layout], list[Layout]]:
    """Return the layouts of `benchmarks.bench_sync`: 32 GB for each trainer (`fp8`: quantised), or 30,000 experts."""
    pytest.importorskip("torch")
    from benchmarks.sync_model import shapes_of

    nbytes = 32 * GB * (1 if kind == "moe" else num_trainers)
    model = [shape_of(*one) for one in shapes_of(kind, nbytes, small=False).items()]
    fp8 = kind == "fp8"
    # FSDP cuts experts like all tensors, and engines hold them unsliced.
    held = trainer_layouts([one._replace(expert=-1) for one in model], num_trainers, shards=num_trainers, fp8=fp8)
    return held, receiver_layouts(model, num_trainers, tp=num_trainers, whole_experts=True, fp8=fp8)


@pytest.mark.parametrize(
    ("kind", "num_trainers", "staged", "measured_s"),
    [
        ("llama", 2, False, 0.0922),
        ("llama", 2, True, 0.1072),
        ("moe", 2, False, 0.0564),
        ("moe", 2, False, 0.0532),
        ("llama", 1, False, 0.0878),
        ("llama", 1, True, 0.1037),
    ],
)
def test_prediction_matches_sync_measured_on_h200(
    kind: str, num_trainers: int, staged: bool, measured_s: float
) -> None:
    """Medians of `update`. Experts: median of three runs. Source: benchmarks/results/cpu2_202611/simulate.md."""
    held, wanted = measured_model(kind, num_trainers)
    cluster, rates = CLUSTERS["h200"]
    found = simulate_sync(plan_sync(held, wanted), cluster, rates, staged=staged, one_node=True)
    assert abs(found.off_by(measured_s)) < 0.1


PYTHON_ON_A_SLOW_HOST = 1802 / 872
"""Time in ms of NCCL's broadcast of the tensors one by one. It depends on Python, so it is not predicted."""


@pytest.mark.parametrize(
    ("kind", "in_arenas", "measured_s"),
    [("llama", False, 0.0948), ("llama", True, 0.0955), ("moe", False, 0.0652), ("fp8", False, 0.0630)],
)
def test_prediction_matches_sync_measured_on_slow_host(kind: str, in_arenas: bool, measured_s: float) -> None:
    """Medians of `update` on a host of four H200. Source: benchmarks/results/cpu2_202611/simulate.md."""
    held, wanted = measured_model(kind, 2)
    one = plan_sync(held, wanted)
    cluster, rates = CLUSTERS["h200"]
    made = transformed_bytes(one, held, wanted) if kind == "fp8" else None
    times = {"as the rates": 1.0, "slow": PYTHON_ON_A_SLOW_HOST}
    found = {
        name: simulate_sync(
            one, cluster, slowed(rates, x), transformed=made, staged=in_arenas, in_arenas=in_arenas, one_node=True
        )
        for name, x in times.items()
    }
    assert abs(found["slow"].off_by(measured_s)) < 0.1
    assert found["as the rates"].predicted_s < found["slow"].predicted_s


@pytest.mark.parametrize(("num_trainers", "measured_s"), [(1, 0.0914), (1, 0.0911), (2, 0.0950), (2, 0.0938)])
def test_prediction_matches_measured_flip_by_exchange(num_trainers: int, measured_s: float) -> None:
    held, wanted = measured_model("llama", num_trainers)
    cluster, rates = CLUSTERS["h200"]
    found = simulate_sync(plan_sync(held, wanted), cluster, rates, in_arenas=True, one_node=True)
    assert abs(found.off_by(measured_s)) < 0.1


@pytest.mark.parametrize(("num_trainers", "measured_s"), [(1, 0.1087), (2, 0.1125)])
def test_prediction_matches_measured_overlapping_snapshot(num_trainers: int, measured_s: float) -> None:
    held, wanted = measured_model("llama", num_trainers)
    one = plan_sync(held, wanted)
    # Every row is copied before it is read, at the rate of copies within a device.
    bucket = dict(zip(wanted[0].names, one.want_bucket[np.argsort(one.want_row[: one.want_first[1]])], strict=True))
    copied = np.zeros((num_trainers, one.num_buckets), np.int64)
    for source, layout in enumerate(held):
        sizes = np.array([form.span_bytes for form in layout.forms])[layout.form]
        np.add.at(copied[source], [bucket[name] for name in layout.names], sizes)
    cluster, rates = CLUSTERS["h200"]
    rates = msgspec.structs.replace(rates, quantise_gb_per_s=rates.device_copy_gb_per_s)
    found = simulate_sync(one, cluster, rates, transformed=copied, one_node=True)
    assert abs(found.off_by(measured_s)) < 0.1


def test_receivers_read_first_from_largest_source() -> None:
    # From FSDP over two to TP over two, an engine needs its rows from one trainer, and columns of the others from both.
    model = list(kimi_k2(num_layers=3, num_experts=8))
    held, wanted = trainer_layouts(model, 2, shards=2), receiver_layouts(model, 2, tp=2)
    cluster, rates = CLUSTERS["h200"]
    predicted = []
    for wants in (wanted, list(reversed(wanted))):
        one = plan_sync(held, wants)
        firsts = [one.part(receiver).first_source for receiver in range(2)]
        assert sorted(firsts) == [0, 1]
        assert firsts == one.link_bytes().argmax(axis=1).tolist()
        made = transformed_bytes(one, held, wants)
        predicted.append(simulate_sync(one, cluster, rates, transformed=made, one_node=True).predicted_s)
    assert predicted[0] == pytest.approx(predicted[1], rel=0.01)


def test_receivers_start_with_distinct_sources() -> None:
    one = plan(4, 4)
    assert [one.part(receiver).first_source for receiver in range(4)] == [0, 1, 2, 3]
    one = plan(4, 2)
    assert [one.part(receiver).first_source for receiver in range(2)] == [0, 2]


def test_small_watermark_increases_predicted_time() -> None:
    rates, one = msgspec.structs.replace(FREE, answer_s=0.1), plan(2, 1)
    some = np.ones((2, one.num_buckets), np.int64)  # Sources that transform get a request for digests before each read.
    wide, narrow = (
        simulate_sync(one, CLUSTER, rates, transformed=some, watermark_bytes=n) for n in (8192 * MIB, 64 * MIB)
    )
    assert narrow.predicted_s > 3 * wide.predicted_s
    assert narrow.moved_bytes == wide.moved_bytes == NBYTES


def test_bottleneck_names_slow_source_link() -> None:
    slow = msgspec.structs.replace(CLUSTER, straggler_share=0.5, straggler_slowdown=10.0)
    found = simulate_sync(plan(4, 4), slow, FREE, seed=2)
    assert found.predicted_s > 5 * found.limit_s
    assert found.bottleneck.startswith("the busiest link: nic")


def test_simulation_reports_effects_of_failed_gpus() -> None:
    deadly = msgspec.structs.replace(CLUSTER, failures_per_gpu_hour=1e5)
    found = simulate_sync(plan(2, 2), deadly, FREE, seed=1)
    assert any("stay on the previous version" in line or "delays nobody" in line for line in found.failed)


sides = st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 4), st.integers(0, 3), st.sampled_from([0.0, 0.5]))


@given(sides)
@settings(max_examples=20, deadline=None)
def test_equal_seeds_reproduce_sync_prediction(given) -> None:
    sources, receivers, seed, share = given
    one = plan(sources, receivers)
    cluster = msgspec.structs.replace(CLUSTER, straggler_share=share)
    first, again = (simulate_sync(one, cluster, CLUSTERS["h200"][1], seed=seed) for _ in range(2))
    assert first == again
    assert first.moved_bytes == one.nbytes
    assert first.predicted_s >= first.limit_s * (1 - 1e-6)
    into = next(load for load in first.links if load.name == "nic in")
    assert into.total_bytes == one.nbytes


@given(sides, st.floats(1.1, 8.0))
@settings(max_examples=20, deadline=None)
def test_faster_links_never_increase_predicted_time(given, factor: float) -> None:
    sources, receivers, seed, share = given
    slow = msgspec.structs.replace(CLUSTER, straggler_share=share)
    fast = msgspec.structs.replace(slow, nic_gb_per_s=50 * factor)
    one = plan(sources, receivers)
    before, after = (simulate_sync(one, each, CLUSTERS["h200"][1], seed=seed).predicted_s for each in (slow, fast))
    assert after <= before * 1.02


def test_sync_diagram_shows_lanes_and_links() -> None:
    found = simulate_sync(plan(2, 2), CLUSTER, CLUSTERS["h200"][1])
    drawn = svg(found)
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    for word in ("nic out", "nic in", "predicted", *(span.lane for span in found.timeline)):
        assert word in drawn


@pytest.mark.parametrize("receiver", [0, 1])
def test_simulated_steps_match_receiver_steps(receiver: int) -> None:
    pytest.importorskip("torch")
    from penstock.plan import sync
    from penstock.sync.publish import transformed
    from penstock.sync.receive.steps import cut
    from penstock.sync.receive.transfer import _TransferRun
    from penstock.transport import cuda_ipc

    assert sync.GROUP_BYTES == cuda_ipc.GROUP_BYTES
    assert BATCH_BYTES == 2 * transformed.BATCH_BYTES
    one = plan(4, 2)
    part = one.part(receiver)
    assert part.first_source == 2 * receiver
    for watermark in (4096 * MIB, 256 * MIB, 32 * MIB):
        first = [np.array([0, NBYTES // 4])] * 4
        window_bytes, piece_bytes = watermark // AHEAD_WINDOWS, watermark // 16
        windows = cut(part, first, np.array([0, NBYTES]), window_bytes=window_bytes, piece_bytes=piece_bytes)
        work = StageWork.of(one, FREE, watermark_bytes=watermark)
        mine = work.receiver == receiver
        assert part.windows(window_bytes) == list(windows.bucket_first)
        assert (work.window[mine] - work.window[mine][0]).tolist() == [step.window for step in windows.steps]
        assert work.source[mine].tolist() == [step.source for step in windows.steps]
        assert work.nbytes[mine].tolist() == [step.nbytes for step in windows.steps]
        # The queue of each source, if some sources are devices of the receiver's host.
        reads = np.flatnonzero(mine)
        for near in ({0, 1, 2, 3}, {0, 3}, set()):
            asked = queued(work, np.isin(work.source, list(near)), 2)[receiver]
            run = SimpleNamespace(
                _key_of=lambda step, near=near: "cuda:0" if step.source in near else step.source,
                _transfer=SimpleNamespace(part=part),
            )
            queues = _TransferRun._queued(cast("_TransferRun", run), windows.steps)
            for key, queue in queues.items():
                expected = [windows.steps.index(step) for step in queue.steps]
                found = [read - reads[0] for read in asked[key != "cuda:0"]]
                assert expected == [i for i in found if key == "cuda:0" or windows.steps[i].source == key]


def test_simulated_model_has_expected_parameter_count() -> None:
    assert sum(np.prod(one.shape) for one in kimi_k2()) == pytest.approx(1.03e12, rel=0.01)
    model = list(kimi_k2(3, 8))
    assert {one.dim for one in model if one.name.endswith("down_proj.weight")} == {1}
    assert shape_of("model.layers.3.mlp.experts.17.up_proj.weight", (8, 8)).expert == 17
    for whole in (False, True):
        held = trainer_layouts(model, 8, shards=4, fp8=True)
        wanted = receiver_layouts(model, 4, tp=2, whole_experts=whole, fp8=True)
        one = plan_sync(held, wanted)
        tagged = sum(np.prod(m.shape) for m in model if "_proj" in m.name)
        twice = transformed_bytes(one, held, wanted)
        dense = sum(np.prod(m.shape) for m in model if "_proj" in m.name and m.expert < 0)
        assert twice.sum() == 2 * (tagged + dense)  # Two replicas hold the tensors outside experts.


def test_prediction_error_is_relative_to_measured_time() -> None:
    found = simulate_sync(plan_sync([layout("s0", NAMES)], [layout("r0", NAMES)]), CLUSTER, FREE)
    assert found.off_by(found.predicted_s / 2) == pytest.approx(1.0)
    assert found.off_by(found.predicted_s * 2) == pytest.approx(-0.5)
