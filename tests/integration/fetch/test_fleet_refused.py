"""A token for other models, a draining holder and a missing holder are reported at once, without a wait."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.compare import assert_same, by_safetensors

import penstock as ps
from penstock.cli.main import run
from penstock.hub.messages import HoldingState, UpstreamsRequest, WhyRequest
from penstock.peer import server as peer_server
from penstock.peer.client import PeerClient
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore

ALL, SECOND, OTHERS = "all-models-0123456789", "all-models-9876543210", "other-models-0123456789"
FAR_S = "120"
"""A deadline that a test would hit if anything waited."""


@pytest.fixture(autouse=True)
def deadline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    directory = tempfile.mkdtemp(prefix="pk-")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
    monkeypatch.setenv("PENSTOCK_STALL_S", FAR_S)
    yield
    shutil.rmtree(directory)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "tokens").write_text(f"{ALL}\n{SECOND}\n{OTHERS} other*\n")
    auth = Auth.of(token_file=tmp_path / "tokens")
    running = HubThread(Directory(MemoryStore(), fresh=True), bind("127.0.0.1:0", auth), auth)
    running.start()
    yield running.url
    running.stop()


def test_refused_member_reads_storage_immediately(hub, small_checkpoint, expected_tensors, tmp_path, capsys) -> None:
    (tmp_path / "mine").write_text(OTHERS)
    asked = [
        "m",
        "--hub",
        hub,
        "--token-file",
        str(tmp_path / "mine"),
        "--fallback",
        str(small_checkpoint),
        "--format",
        "json",
    ]
    with pytest.raises(SystemExit) as ended:
        run(["fetch", "--to", str(tmp_path / "out"), *asked])
    said = json.loads(capsys.readouterr().out)
    assert not ended.value.code
    assert said["wall_s"] < float(FAR_S) / 4  # A missing hub is waited for during half of the deadline.
    assert ["refused" in fault and "this token is not for m" in fault for fault in said["faults"]] == [True]
    assert ["it refused: this token is not for m" in why for why in said["why"].values()] == [True]
    assert_same(by_safetensors(tmp_path / "out"), expected_tensors)


def test_refused_member_without_storage_fails(hub, small_checkpoint, expected_tensors) -> None:
    targets = {name: torch.zeros_like(tensor) for name, tensor in expected_tensors.items()}
    with ps.join("m", connection=ps.ConnectionSettings(hub=hub, token=OTHERS)) as fleet:
        for target in ({}, targets):
            with pytest.raises(ps.errors.PermissionDenied, match="this token is not for m") as caught:
                fleet.fetch(target)
            assert caught.value.hint and not caught.value.mutated
    with pytest.raises(ps.errors.PermissionDenied, match="this token is not for m"):
        ps.cache.attach("m", connection=ps.ConnectionSettings(hub=hub, token=OTHERS), timeout_s=float(FAR_S))


def test_fetch_reports_draining_holder(hub, small_checkpoint, expected_tensors, monkeypatch) -> None:
    monkeypatch.setattr(peer_server, "LEASE_TTL_S", float(FAR_S))
    with (
        ps.join("m", connection=ps.ConnectionSettings(hub=hub, token=ALL)) as holder,
        ps.join("m", connection=ps.ConnectionSettings(hub=hub, token=ALL)) as reader,
    ):
        holder.fetch({}, fallback=small_checkpoint)
        (held,) = holder.member.weights
        asked = UpstreamsRequest(
            member=reader.member.id,
            holding=HoldingState(key=held.key, identity=held.identity, num_chunks=0, nbytes=0),
            source=holder.member.id,
        )
        (upstream,) = reader.member.hub.upstreams(asked).upstreams
        with reader.member.peer(upstream, held.key) as peer:
            peer.lease()
            leaving = threading.Thread(target=holder.leave, args=(float(FAR_S),))
            leaving.start()
            why, said = WhyRequest(model="m", identity=held.identity), "is draining with"
            while not any(said in line and "admits no new reader" in line for line in reader.member.hub.why(why).lines):
                time.sleep(0.02)  # The deadline of pytest ends the process.
            with ps.join("m", connection=ps.ConnectionSettings(hub=hub, token=ALL)) as late:
                weights: dict[str, torch.Tensor] = {}
                report = late.fetch(weights, fallback=small_checkpoint)
        leaving.join()
    assert_same(weights, expected_tensors)
    assert any("is draining" in fault for fault in report.faults), report.faults
    assert list(report.nbytes_by_path) == [f"storage {small_checkpoint}"]


def test_leases_are_divided_fairly_between_tokens(hub, small_checkpoint) -> None:
    with contextlib.ExitStack() as stack:

        def join(token: str, **options: int) -> ps.Fleet:
            connection = ps.ConnectionSettings(hub=hub, token=token)
            return stack.enter_context(ps.join("m", connection=connection, **options))

        holder = join(ALL, max_readers=2)
        holder.fetch({}, fallback=small_checkpoint)
        (held,) = holder.member.weights

        def lease(token: str) -> PeerClient:
            reader = join(token).member
            holding = HoldingState(key=held.key, identity=held.identity, num_chunks=0, nbytes=0)
            asked = UpstreamsRequest(member=reader.id, holding=holding, source=holder.member.id)
            (upstream,) = reader.hub.upstreams(asked).upstreams
            peer = stack.enter_context(reader.peer(upstream, held.key))
            peer.lease()
            return peer

        first, second = lease(ALL), lease(ALL)
        with pytest.raises(ps.errors.SourceBusy, match="maximum number of readers"):
            lease(ALL)
        lease(SECOND)
        with pytest.raises(ps.errors.SourceBusy, match="a caller with fewer"):
            first.log(0, 0.0)
        second.log(0, 0.0)


def test_fetch_without_holder_reports_reason(hub, small_checkpoint) -> None:
    with ps.join("m", connection=ps.ConnectionSettings(hub=hub, token=ALL)) as fleet:
        with pytest.raises(ps.NotFound, match="no member holds 'm'"):
            fleet.fetch({}, timeout_s=0.0)
        report = fleet.fetch({}, fallback=small_checkpoint)
    assert report.faults == ()
    assert list(report.why.values()) == ["no member had these chunks or was reading them"]
