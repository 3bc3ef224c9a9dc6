"""A hub's repository as the fallback of a fleet: each byte leaves the hub once."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.integration.conftest import Host, assert_fetched
from tests.support.servers.hugging_face import HuggingFaceServer


def test_fleet_reads_each_byte_once_from_hugging_face(
    host: Host, small_checkpoint: Path, expected_tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    files = {path.name: path.read_bytes() for path in small_checkpoint.iterdir()}
    with HuggingFaceServer({"org/made": files}) as hub:
        environ = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"}
        # The slow rate lets a member that starts late find chunks to claim.
        members = host.start_together(2, fallback="org/made", storage_pause_s=0.2, environ=environ)
        reports = [assert_fetched(member, expected_tensors) for member in members]
        nbytes = sum(tensor.nbytes for tensor in expected_tensors.values())
        assert sum(report["storage_bytes"] for report in reports) == nbytes
        assert all(report["storage_bytes"] for report in reports), "both had a part of the reading"
        # Each member also reads headers, and a byte of each file to check that it exists.
        assert nbytes <= hub.storage.num_bytes_sent < 1.05 * nbytes
