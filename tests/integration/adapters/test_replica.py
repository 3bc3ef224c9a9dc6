"""Replicas of an engine on one host: the second reads everything from the first, which drains when asked to."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("starlette")

from penstock.spi import engine_weights as replica  # noqa: E402
from penstock.testing.checkpoints import write_llama  # noqa: E402
from penstock.types import MIB  # noqa: E402

LOG = logging.getLogger("engine")


@pytest.fixture
def runtime(monkeypatch) -> Iterator[None]:
    """Use a separate hub in a directory whose name is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
        yield


def start(options: replica.FleetOptions, uri: str) -> dict[str, torch.Tensor]:
    """Load as an engine does: copy each tensor as it arrives."""
    fleet = replica.join(options, uri, log=LOG)
    assert fleet is not None
    return {name: tensor.clone() for name, tensor in replica.tensors(fleet, uri, options, log=LOG)}


def test_second_replica_reads_all_weights_from_first(runtime, tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO, "engine")
    uri, told = str(tmp_path / "llama"), tmp_path / "drain"
    write_llama(tmp_path / "llama", total_bytes=4 * MIB, shards=2)

    first = start(replica.FleetOptions(fleet="m", drain_file=str(told)), uri)
    assert f"storage {uri}" in caplog.text
    caplog.clear()
    second = start(replica.FleetOptions(fleet="m", serve=False), uri)
    assert "storage" not in caplog.text.partition("verified")[0]
    assert " <- " in caplog.text
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first)

    told.touch()
    done, deadline = tmp_path / "drain.done", time.monotonic() + 30
    while not done.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    caplog.clear()
    start(replica.FleetOptions(fleet="m", serve=False), uri)
    assert f"storage {uri}" in caplog.text
