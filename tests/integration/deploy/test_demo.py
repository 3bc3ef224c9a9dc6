"""The demo: a fleet reads storage once, a model is served during training, conversions resume, and all bytes are equal.

CI runs `make demo`, which does the same with larger sizes.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.support.long_running import long_running

pytest.importorskip("torch")
pytest.importorskip("starlette")

from tests.support.servers.http_server import Faults, RangeServer

from penstock.testing.checkpoints import write_llama
from penstock.types import MIB

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"


def script(name: str, monkeypatch) -> ModuleType:
    """Import a script as a module."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@long_running
def test_fleet_demo_reads_storage_once(monkeypatch, tmp_path: Path, capsys) -> None:
    demo_fleet = script("demo_fleet", monkeypatch)
    write_llama(tmp_path / "llama", total_bytes=32 * MIB, shards=2)
    with RangeServer(tmp_path / "llama", faults=Faults(total_bytes_per_s=50_000_000)) as server:
        assert demo_fleet.fleet_demo(server, "model.safetensors.index.json", "cpu", 2)
    printed = capsys.readouterr().out
    assert "storage sends 50 MB/s" in " ".join(printed.split())
    assert "own loads 3.00x, fleet 1.00x" in " ".join(printed.split()).replace("│ │", "")
    assert printed.count("equal") == 3
    assert "because" in printed
    assert "DIFFERENT" not in printed


@long_running
def test_sync_demo_engine_weights_match_trainer(monkeypatch, capsys) -> None:
    assert script("demo_sync", monkeypatch).sync_demo(4 * MIB)
    printed = capsys.readouterr().out
    assert printed.count("equal") == 6
    assert "1, killed, back" in printed


@long_running
def test_convert_demo_resumes_after_kill(monkeypatch, tmp_path: Path, capsys) -> None:
    assert script("demo_convert", monkeypatch).convert_demo(16 * MIB, tmp_path)
    printed = capsys.readouterr().out
    assert printed.count("equal") == 2
    assert printed.count("yes") == 2
    assert list(tmp_path.iterdir()) == []
