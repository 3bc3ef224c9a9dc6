"""The demo's fleet: storage is read once, the server itself counts it, and every process ends with equal bits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")

from penstock.testing.checkpoints import write_llama
from penstock.testing.http_server import RangeServer
from penstock.types import MIB

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def demo_fleet(monkeypatch) -> ModuleType:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("demo_fleet", SCRIPTS / "demo_fleet.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo_fleet", module)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_demos_fleet_reads_storage_once(demo_fleet: ModuleType, tmp_path: Path, capsys) -> None:
    write_llama(tmp_path / "llama", total_bytes=32 * MIB, shards=2)
    with RangeServer(tmp_path / "llama") as server:
        places = [demo_fleet.http_place(server, "model.safetensors.index.json")]
        assert demo_fleet.fleet_demo(places, "cpu", 2)
    printed = capsys.readouterr().out
    assert "fleet 1.00x" in " ".join(printed.split()).replace("│ │", "")
    assert printed.count("equal") == 3
    assert "because" in printed
    assert "DIFFERENT" not in printed
