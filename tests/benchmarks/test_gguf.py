"""The kinds of run of `benchmarks/bench_gguf.py` on a small file, in this process: both sides make the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.servers.http_server import RangeServer

from benchmarks import bench_gguf

pytestmark = pytest.mark.usefixtures("launcher_fork_servers")


def test_penstock_and_stock_library_write_equal_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"WIDTH": 128, "ROWS": 64, "TOKENS": 50, "MERGES": 9}.items():
        monkeypatch.setattr(bench_gguf, name, value)
    bench_gguf.write(tmp_path, 0.0)
    assert bench_gguf.limit(tmp_path / "model.gguf", cold=True) > 0
    with RangeServer(tmp_path) as server:
        sources = {"http": f"{server.url}/model.gguf", "quantise": str(tmp_path / "bf16")}
        for kind in bench_gguf.ROWS_OF:
            totals = set()
            for who in ("penstock", "stock"):
                scratch = tmp_path / f"{kind} {who}"
                scratch.mkdir()
                bench_gguf.run(kind, who, sources.get(kind, str(tmp_path / "model.gguf")), scratch)
                totals.add(json.loads(capsys.readouterr().out.splitlines()[-1])["total"])
            assert len(totals) == 1, kind
