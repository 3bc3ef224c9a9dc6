"""Workers that start together without a copy read storage once in total."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.integration.conftest import Host, assert_fetched
from tests.support.compare import by_safetensors
from tests.support.servers.http_server import Faults, RangeServer

from penstock.cli.checkpoints import manifest
from penstock.config import Settings
from penstock.storage.safetensors import HEADER_GUESS_BYTES
from penstock.storage.weight_set import open_weights
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB

COUNTS = (6, 8, 12, 16, 32) if os.environ.get("DRILLS") == "all" else (6, 8)
SLOW_BYTES_PER_S = 50_000_000
"""Bandwidth that all readers of a slow storage share."""
DEFAULTS = {
    "penstock.holding.weight_layout.CHUNK_BYTES": 16 * MIB,
    "penstock_hub.claims.MIN_PIECE_BYTES": 64 * MIB,
    "penstock_hub.claims.CLAIM_STALL_S": 30.0,
}
"""The product's own constants: other tests of this folder use smaller ones."""


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RangeServer, Path]]:
    """Write 96 MiB as `plain`, and with its manifest as `sealed`."""
    root = tmp_path_factory.mktemp("storage")
    write_llama(root / "plain", total_bytes=96 * MIB, shards=2)
    shutil.copytree(root / "plain", root / "sealed")
    manifest(str(root / "sealed"))
    with RangeServer(root) as server:
        yield server, root


def weight_bytes_sent(server: RangeServer, root: Path) -> int:
    """Return the bytes that the server sent, without headers, indexes and manifests."""
    other = 0
    for request in server.requests:
        if request.method == "GET" and request.range is not None:
            start, stop = request.range
            path = root / request.path.lstrip("/")
            if path.is_file() and (path.suffix != ".safetensors" or start < data_offset(path)):
                other += min(stop, path.stat().st_size) - start
    return server.num_bytes_sent - other


def nbytes_of(tensors: dict[str, torch.Tensor]) -> int:
    """Return the total size of the files."""
    return sum(tensor.nbytes for tensor in tensors.values())


def data_offset(path: Path) -> int:
    """Return the offset of the tensors in a safetensors file."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


@pytest.mark.parametrize("bytes_per_s", [None, SLOW_BYTES_PER_S], ids=["fast", "slow"])
@pytest.mark.parametrize("name", ["plain", "sealed"])
@pytest.mark.parametrize("count", COUNTS)
def test_storage_is_read_once_by_concurrent_starts(
    count: int, name: str, bytes_per_s: int | None, host: Host, storage: tuple[RangeServer, Path]
) -> None:
    server, root = storage
    server.faults, server.num_bytes_sent = Faults(total_bytes_per_s=bytes_per_s), 0
    server.requests.clear()
    truth = by_safetensors(root / name)
    workers = host.start_together(count, constants=DEFAULTS, fallback=f"{server.url}/{name}")
    reports = [assert_fetched(worker, truth) for worker in workers]
    assert weight_bytes_sent(server, root) == nbytes_of(truth)
    assert [report["faults"] for report in reports] == [[]] * count  # a full holder is no fault
    told = sum(report["storage_bytes"] + report["header_bytes"] for report in reports)
    assert 0 <= server.num_bytes_sent - told <= 16 * count  # a byte for each object that is opened


def test_opening_file_reads_exactly_its_header(tmp_path: Path) -> None:
    short, long = tmp_path / "short", tmp_path / "long"
    write_llama(short, total_bytes=4 << 20, shards=1)
    long.mkdir()
    save_file({f"layer.{i}": torch.zeros(64) for i in range(4000)}, long / "model.safetensors")
    with RangeServer(tmp_path) as server:
        for name in ("short", "long"):
            server.num_bytes_sent = 0
            with open_weights(f"{server.url}/{name}", settings=Settings()) as weights:
                path = tmp_path / name / weights.manifest.files[0].name
                said = 8 + int.from_bytes(path.read_bytes()[:8], "little")
                assert 0 <= server.num_bytes_sent - weights.opening_bytes <= 16  # a byte for each object opened
                assert weights.opening_bytes == max(said, HEADER_GUESS_BYTES)
