"""`penstock convert`: operation arguments, the plan with its prediction, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.cli.main import run
from penstock.cli.terminal import OutputFormat
from penstock.errors import ConfigError
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB
from penstock_convert.command import write_report
from penstock_convert.operations.spec import operation_spec
from penstock_convert.plan.cluster import CPU_RATES, to_json
from penstock_convert.report import ConvertReport, WorkerStats


def report(**more: Any) -> ConvertReport:
    told: dict[str, Any] = dict.fromkeys(ConvertReport.__struct_fields__, 0)
    told |= {
        "uri": "out",
        "revision": "w1-",
        "operation": "copy",
        "busy_s": {"fetch": 2.0},
        "workers": (),
        "left_out": (),
        "why_left_out": {},
    }
    told |= {"verified": False, "why": "no manifest at m", "read_bytes": 3_000_000, "verified_bytes": 1_000_000}
    told |= {
        "wall_s": 16.0,
        "phases": {"start": 2.0, "move": 13.0, "end": 1.0},
        "num_workers": 1,
        "predicted_s": None,
        "predicted_by": "nothing is known",
    }
    return ConvertReport(**told | more)


def test_report_omits_reassigned_tasks_if_no_worker_failed(capsys: pytest.CaptureFixture[str]) -> None:
    healthy = WorkerStats(worker="0", device="cpu")
    told = {"num_tasks": 9, "num_stolen": 2, "num_twice": 1, "fetched_bytes": 4_000_000, "workers": (healthy,)}
    write_report(report(**told), OutputFormat.human)
    text = capsys.readouterr().out
    assert "reassigned" not in text and "duplicated" not in text
    assert "3.00 MB are needed, because idle workers repeated 1 task to finish sooner" in text
    lost = WorkerStats(worker="1", device="cpu", end="signal 9")
    write_report(report(**{**told, "workers": (healthy, lost)}), OutputFormat.human)
    assert "2 reassigned, 1 duplicated, 1 worker was lost" in capsys.readouterr().out


def test_skipped_files_are_grouped_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    why = {f"m/onnx/{i}": "another format" for i in range(7)} | {"m/x.bin": "weights"}
    write_report(report(left_out=tuple(why), why_left_out=why), OutputFormat.human)
    lines = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert len(lines) == 2 and "m/onnx/4 and 2 more: another format" in lines[0] and "m/x.bin: weights" in lines[1]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("average", {"op": "average"}),
        ("linear:weights=0.3,1", {"op": "linear", "weights": [0.3, 1]}),
        ("slerp:t=0.4;scale=2", {"op": "slerp", "t": 0.4, "scale": 2}),
        ("dequantise:to=BF16", {"op": "dequantise", "to": "BF16"}),
        ("linear:normalize=false", {"op": "linear", "normalize": False}),
        ("package.module:function", {"op": "function", "function": "package.module:function"}),
        ('{"op": "rename", "rules": [["a", "b"]]}', {"op": "rename", "rules": [["a", "b"]]}),
    ],
)
def test_operation_option_text_is_parsed(text: str, word: dict[str, Any]) -> None:
    assert operation_spec(text) == word


@pytest.mark.parametrize("text", ["{", "linear:a=1;b", "{1}"])
def test_invalid_operation_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        operation_spec(text)


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"predicted_s": 12.1, "predicted_by": "r"}, "predicted 12.10 s, took 13.00 s (7 % over), from r\n"),
        ({"predicted_s": 26.0, "predicted_by": "r"}, "predicted 26.00 s, took 13.00 s (50 % under), from r\n"),
        ({}, "took 13.00 s, without a prediction: nothing is known\n"),
        ({}, "not verified: no manifest at m; 1.00 MB of 3.00 MB compared\n"),
        ({"verified": True, "why": "compared"}, "  verified: compared; "),
        ({}, " 16.00 s, with 2.00 s to start and 1.00 s to end; "),
    ],
)
def test_report_shows_prediction_error_and_verification(told, says, capsys) -> None:
    write_report(report(**told), OutputFormat.human)
    assert says in capsys.readouterr().out


def test_json_report_has_every_field(capsys) -> None:
    write_report(report(predicted_s=10.0), OutputFormat.json)
    found = json.loads(capsys.readouterr().out)
    assert found["off_by"] == pytest.approx(0.3) and found["why"] == "no manifest at m"
    assert report().off_by is None and report(predicted_s=1.0, phases={"move": 0.0}).off_by is None


def test_convert_dry_run_uses_measured_rates(tmp_path: Path, capsys) -> None:
    write_llama(tmp_path / "llama", total_bytes=2 * MIB, fp8=False)
    rates = msgspec.structs.replace(CPU_RATES, name="mine", quantise_gb_per_s=1e-3)
    (tmp_path / "rates.json").write_bytes(to_json(rates))
    command = ["convert", str(tmp_path / "llama"), str(tmp_path / "out"), "--devices", "cpu", "--workers", "1"]
    for more, least in (["--rates", str(tmp_path / "rates.json")], 2.0), ([], None):
        with pytest.raises(SystemExit) as caught:
            run([*command, *more, "--dry-run", "--format", "json"])
        assert not caught.value.code
        found = json.loads(capsys.readouterr().out)
        if least is None:
            assert found["predicted_s"] is None and "penstock calibrate" in found["predicted_by"]
        else:
            assert found["predicted_s"] > least and "mine" in found["predicted_by"]
    assert not (tmp_path / "out").exists()


def test_dry_run_into_cache_predicts_one_file(tmp_path: Path, capsys) -> None:
    write_llama(tmp_path / "llama", total_bytes=2 * MIB, fp8=False)
    for into, is_one in ("cache:made", True), (str(tmp_path / "out"), False):
        with pytest.raises(SystemExit) as caught:
            run(["convert", str(tmp_path / "llama"), into, "--shard-bytes", "500K", "--dry-run", "--format", "json"])
        assert not caught.value.code
        assert (json.loads(capsys.readouterr().out)["num_files"] == 1) == is_one
