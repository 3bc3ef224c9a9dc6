"""The benchmark of from_pretrained: its parts run, and both kinds load the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import bench_from_pretrained as bench


def test_penstock_and_transformers_load_equal_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.make("transformers", tmp_path, 0.01)
    for kind in ("stock", "penstock"):
        bench.run("transformers", kind, str(tmp_path / "model"), "", "cpu")
    stock, penstock = map(json.loads, capsys.readouterr().out.splitlines())
    assert stock["total"] == penstock["total"] != 0
    assert "read from disk" in penstock["how"] and stock["how"] == ""
    assert stock["seconds"] > 0 and penstock["peak_mb"] >= 0
