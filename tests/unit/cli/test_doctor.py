"""`penstock doctor` reports the parts of a machine, and why a part is missing."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from penstock.cli import doctor, terminal
from penstock.cli.main import app


def test_doctor_json_reports_every_component(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_RETRIES", "9")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "never to be shown")
    file = tmp_path / "disk"
    file.write_bytes(b"x" * (4 << 20))
    result = CliRunner().invoke(app, ["doctor", "--path", str(file), "--format", "json"], catch_exceptions=False)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert {fact["name"] for fact in found["devices"]} >= {"cpu", "memory"}
    rates = {limit["name"]: limit["gb_per_s"] for limit in found["limits"]}
    assert rates["host memory copy, one thread"] > 0
    assert rates["disk read, buffered, one thread"] > 0
    assert {fact["name"] for fact in found["engines"]} >= {"obstore", "torch", "vllm"}
    values = {variable["name"]: variable["value"] for variable in found["environment"]}
    assert values["PENSTOCK_RETRIES"] == "9"
    assert values["PENSTOCK_CACHE_DIR"] is None
    assert values["AWS_SECRET_ACCESS_KEY"] == "(set)"
    assert "never to be shown" not in result.stdout


def test_doctor_text_matches_json_components() -> None:
    result = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert result.exit_code == 0
    for part in ("devices", "limits, measured now", "engines", "environment", "pass --path FILE"):
        assert part in result.stdout


def test_doctor_reports_missing_file_without_failing(tmp_path: Path) -> None:
    limits = doctor.measure_limits(tmp_path / "absent")
    disk = [limit for limit in limits if limit.name.startswith("disk")]
    assert disk
    assert all(limit.gb_per_s is None and "No such file" in limit.why for limit in disk)


def test_doctor_reports_no_rate_for_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    limits = doctor.measure_limits(tmp_path / "empty")
    assert any("is empty" in limit.why for limit in limits)


def test_doctor_reports_no_version_for_missing_package() -> None:
    assert terminal.package_version("no-such-distribution") is None
    assert terminal.package_version("penstock")
    assert not terminal.importable("no_such_module")
