"""Predictions of a job on the machine at hand: what they rest on, and why there are none."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import msgspec
import pytest

from penstock.errors import PlanError
from penstock.types import GB, MIB, DType, Manifest
from penstock_convert import report as module
from penstock_convert.job import ConversionJob, plan_job
from penstock_convert.operations.formats import StoreOperation
from penstock_convert.operations.operation import Chain
from penstock_convert.operations.spec import operation_of
from penstock_convert.plan.cluster import CPU_RATES, H200_RATES, Rates
from penstock_convert.plan.tasks import Spec, lay_out
from penstock_convert.report import predict

RATES: Rates = msgspec.structs.replace(CPU_RATES, name="here", quantise_gb_per_s=2.0, device_copy_gb_per_s=10.0)
URIS = ["/weights/model.safetensors", "/out"]


@pytest.fixture(scope="module")
def job() -> ConversionJob:
    """A copy of 4 GB."""
    table = lay_out([Spec(name=f"t{i}", dtype=DType.U8, shape=(1000, MIB)) for i in range(4)], shard_bytes=8 * GB).table
    source = Manifest(files=(), tensors=table, leaf_bytes=1, leaves=None, revision="h1-")
    return plan_job(operation_of([]), [source])


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def test_report_predicts_slowest_stage_from_rates(job: ConversionJob) -> None:
    seconds, why = predict(job, frozenset(), URIS, ["cpu"], RATES)
    assert seconds == pytest.approx(int(job.read_bytes.sum()) / GB / 2.0, rel=0.05)
    assert why == "the rates of here, assuming that the disk keeps up"


def test_each_operation_has_separate_rate(job: ConversionJob) -> None:
    rates = msgspec.structs.replace(RATES, operation_gb_per_s={"co": 9.0, "copy": 0.5, "to fp8-block128": 0.25})
    nbytes = int(job.read_bytes.sum()) / GB
    assert predict(job, frozenset(), URIS, ["cpu"], rates)[0] == pytest.approx(nbytes / 0.5, rel=0.05)
    # The steps of a chain follow each other.
    quantise = StoreOperation("fp8-block128")
    for operation, expected in ((quantise, 4.0), (Chain(job.operation, quantise), 6.0)):
        other = dataclasses.replace(job, operation=operation)
        assert predict(other, frozenset(), URIS, ["cpu"], rates)[0] == pytest.approx(nbytes * expected, rel=0.05)


def test_zero_measured_rate_is_rejected() -> None:
    with pytest.raises(PlanError, match="rates of operations"):
        msgspec.structs.replace(RATES, operation_gb_per_s={"copy": 0.0}).check()


def test_predicted_time_divides_work_among_workers(job: ConversionJob) -> None:
    one, two, four = (predict(job, frozenset(), URIS, ["cpu"] * count, RATES)[0] for count in (1, 2, 4))
    assert one is not None and two == pytest.approx(one / 2, rel=0.05) and four == pytest.approx(two, rel=0.1)


def test_prediction_excludes_finished_tasks(job: ConversionJob) -> None:
    half = frozenset(range(len(job.tasks) // 2))
    whole, left = (predict(job, kept, URIS, ["cpu"], RATES)[0] for kept in (frozenset[int](), half))
    assert whole is not None and left == pytest.approx(whole / 2, rel=0.05)
    assert predict(job, set(range(len(job.tasks))), URIS, ["cpu"], RATES) == (None, "nothing was left to do")


@pytest.mark.parametrize(
    ("uris", "devices", "why"),
    [
        (URIS, ["cpu"], "no rates are known for this processor: measure it with `penstock calibrate FILE`"),
        (["s3://b/m.safetensors", "/out"], ["cpu"], "no rate is known for s3://b/m.safetensors"),
        (URIS, [], "no rates are known for other hosts"),
        (URIS, ["cuda:0"], "no rates are known for NVIDIA A10"),
    ],
)
def test_report_lists_missing_rates(
    job: ConversionJob, uris: list[str], devices: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_gpus", lambda: {"NVIDIA A10"})
    assert predict(job, frozenset(), uris, devices, None) == (None, why)


def test_gpus_are_matched_by_driver_name(job: ConversionJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(2):
        (tmp_path / f"0000:{i}").mkdir()
        (tmp_path / f"0000:{i}" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ:   \t\t 255\n")
    monkeypatch.setattr(module, "GPUS", tmp_path)
    links = msgspec.structs.replace(H200_RATES, worker_gb_per_s=0.0, host_gb_per_s=0.0)
    for rates, gb_per_s in ((None, H200_RATES.worker_gb_per_s), (links, 55.5)):
        one, shared, two = (
            predict(job, frozenset(), URIS, devices, rates)[0]
            for devices in (["cuda:0"], ["cuda:0", "cuda:0"], ["cuda:0", "cuda:1"])
        )
        assert one == pytest.approx(int(job.read_bytes.sum()) / GB / gb_per_s, rel=0.1)
        assert two == pytest.approx(one / 2, rel=0.1)
        assert shared == pytest.approx(one if rates is links else two, rel=0.1)  # the link is shared, processes are not
