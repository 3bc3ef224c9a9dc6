"""A fetch trusts the manifest's digests, or those of the member that read storage. Errors name the culprit."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch
from tests.integration.conftest import Host, assert_fetched
from tests.support.compare import assert_same

import penstock as ps
from penstock.errors import IntegrityError, NotFound, PeerLost

RARE_HEARTBEATS = {"penstock.hub.local_hub.BEAT_S": 5.0, "penstock.hub.local_hub.TTL_S": 60.0}
"""Start a hub with rare heartbeats, so that no member detects its own corrupt memory in time."""


def flip(directory: Path) -> None:
    path = sorted(directory.glob("*.safetensors"))[0]
    with path.open("r+b") as file:
        file.seek(-5, 2)
        byte = file.read(1)[0]
        file.seek(-5, 2)
        file.write(bytes([byte ^ 16]))


def test_manifest_identifies_weights_at_any_location(
    host: Host, checkpoint_with_manifest: Path, expected_tensors, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint_with_manifest, copy)
    first = assert_fetched(host.start(fallback=str(checkpoint_with_manifest)), expected_tensors)
    assert first["verified"] and first["verified_against"] == "the manifest's digests"
    # A different location has the same revision, so its bytes need not be read.
    second = assert_fetched(host.start(fallback=str(copy)), expected_tensors)
    assert second["storage_bytes"] == 0 and second["verified_against"] == "the manifest's digests"
    assert assert_fetched(host.start(), expected_tensors)["revision"] == first["revision"] == second["revision"]


def test_unverified_copies_are_not_exchanged(
    host: Host, small_checkpoint: Path, expected_tensors, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    # The copies have a different modification time.
    shutil.copytree(small_checkpoint, copy, copy_function=shutil.copyfile)
    assert_fetched(host.start(fallback=str(small_checkpoint)), expected_tensors)
    assert list(assert_fetched(host.start(fallback=str(copy)), expected_tensors)["paths"]) == [f"storage {copy}"]


def test_flipped_storage_bit_is_detected_by_reader(
    host: Host, checkpoint_with_manifest: Path, expected_tensors, tmp_path: Path
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(checkpoint_with_manifest, bad)
    flip(bad)
    failed = host.start(fallback=str(bad)).wait_for("failed")
    assert failed["error"] == "IntegrityError" and str(bad) in failed["message"] and not failed["num_tensors"]
    good = host.start(fallback=str(checkpoint_with_manifest))
    assert_fetched(good, expected_tensors)
    # A reader that does not need the bad copy succeeds.
    assert assert_fetched(host.start(fallback=str(bad)), expected_tensors)["storage_bytes"] == 0


@pytest.mark.parametrize("has_manifest", [True, False])
def test_fetch_delivers_no_tensor_if_storage_changes(
    host: Host, small_checkpoint: Path, checkpoint_with_manifest: Path, tmp_path: Path, has_manifest: bool
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint_with_manifest if has_manifest else small_checkpoint, copy)
    with ps.join("bystander"):  # The hub runs here, so the worker exits.
        worker = host.start(fallback=str(copy), storage_pause_s=0.1)
        worker.wait_for("joined")
        host.wait_for_holdings(lambda held: any(one.have for one in held))
        flip(copy)
        failed = worker.wait_for("failed")
        assert failed["error"] in ({"SourceChanged", "IntegrityError"} if has_manifest else {"SourceChanged"}), failed
        assert not failed["num_tensors"] and not any(one.state == "whole" for one in host.holdings())


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("has_storage", [True, False])
def test_corruption_error_names_holder(
    host: Host,
    small_checkpoint: Path,
    checkpoint_with_manifest: Path,
    expected_tensors,
    has_manifest: bool,
    has_storage: bool,
) -> None:
    uri = str(checkpoint_with_manifest if has_manifest else small_checkpoint)
    with ps.join("bystander"):  # The hub runs here, so the holder exits when it is told to.
        bad = host.start(RARE_HEARTBEATS, fallback=uri, corrupt_at=7)
        member = bad.wait_for("joined")["member"]
        bad.wait_for("corrupted")
        if not has_storage:
            good = host.start(fallback=uri, connection={"transports": ["http"]})
            good.wait_for("fetched")  # The bytes are from the bad holder, and the wrong chunks from storage.
        reader = host.start(fallback=uri if has_storage else None)
        report = assert_fetched(reader, expected_tensors)
        if has_storage:
            # On a busy machine the holder's own check, at its next heartbeat, may come before the reader's.
            why = ("digest", "does not hold the weights of this key")
            named = [fault for fault in report["faults"] if member[:8] in fault and any(text in fault for text in why)]
            assert named, report["faults"]
            assert report["storage_bytes"]  # The difference is all bytes if the wrong chunk is verified first.
        # A complaint affects only the member that complains, because all members here are one caller. But the holder
        # learns which chunk it was, finds it wrong itself, and stops serving.
        hub, deadline = host.hub(), time.monotonic() + 30
        while any(one.member == member and one.holdings for one in hub.status().members):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        late = assert_fetched(host.start(), expected_tensors)
        assert not any(member[:8] in path for path in late["paths"])


def test_holder_detects_its_corrupt_memory(host: Host, small_checkpoint: Path, expected_tensors) -> None:
    holder = host.start({"penstock.hub.local_hub.BEAT_S": 0.02}, fallback=str(small_checkpoint))
    assert_fetched(holder, expected_tensors)
    host.wait_for_holdings(lambda held: any(one.state == "whole" for one in held))
    holder.send("corrupt 7")
    host.wait_for_holdings(lambda held: not any(one.state == "whole" for one in held))


def test_disagreeing_holders_without_manifest_fail_fetch(host: Host) -> None:
    torch.manual_seed(6)
    tensors = {f"t{i:02}": torch.randn(1 << 17) for i in range(16)}
    other = {name: tensor.clone() for name, tensor in tensors.items()}
    other["t09"][5] += 1
    slow = {"max_bytes_per_s": 2 << 20}
    with ps.join("m", **slow) as one, ps.join("m", **slow) as two, ps.join("m") as reader:
        assert one.offer(tensors, revision="r") == two.offer(other, revision="r")
        weights: dict[str, torch.Tensor] = {}
        with pytest.raises(IntegrityError, match="report different digests") as caught:
            reader.fetch(weights)
        assert one.member.id in str(caught.value) and two.member.id in str(caught.value)
        assert not weights
        two.leave()
        reader.fetch(weights)
        assert_same(weights, tensors)


def test_holder_that_differs_from_manifest_is_excluded(
    host: Host, checkpoint_with_manifest: Path, expected_tensors
) -> None:
    with ps.join("m") as good, ps.join("m") as reader:
        first: dict[str, torch.Tensor] = {}
        key = good.fetch(first, fallback=checkpoint_with_manifest).key
        revision = good.member.weights[0].identity.revision
        with ps.join("m") as liar:
            theirs = {name: tensor.clone() for name, tensor in expected_tensors.items()}
            theirs[min(theirs)].view(-1).view(torch.uint8)[3] ^= 1
            assert liar.offer(theirs, revision=revision) == key
            good.fence()
            weights: dict[str, torch.Tensor] = {}
            report = reader.fetch(weights, fallback=checkpoint_with_manifest)
            assert_same(weights, expected_tensors)
            assert any("differ from the manifest's" in fault for fault in report.faults)
            assert report.storage_bytes == report.nbytes  # No bytes were read from it.
        # PeerLost may occur on a busy machine, because the hub lists the member that left until its heartbeats are
        # missed.
        with ps.join("m") as late, pytest.raises((NotFound, PeerLost)):
            reader.fence()
            late.fetch({}, timeout_s=0.0)
