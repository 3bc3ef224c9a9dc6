"""One caller of a hub cannot harm others by complaints, and can do nothing once its token is revoked."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tests.support.compare import assert_same

import penstock as ps
from penstock.errors import PermissionDenied, UnknownMember
from penstock.hub.client import HubClient
from penstock.hub.messages import Beat, FaultReport, Hello, MemberStatus

FLEET, LIAR, OTHER = "fleet-token-0123456789", "liar-token-0123456789", "other-token-0123456789"
SECOND = "second-token-0123456789"
TOKENS = f"{FLEET} m\n{LIAR} m\n{SECOND} m\n{OTHER} other*\n"


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    directory = tempfile.mkdtemp(prefix="pc-")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
    monkeypatch.setenv("PENSTOCK_STALL_S", "10")
    monkeypatch.setattr("penstock.holding.weight_layout.CHUNK_BYTES", 256 << 10)
    yield
    shutil.rmtree(directory)


class GuardedHub:
    """`penstock hub` as a process, with a token file and an audit file."""

    def __init__(self, directory: Path) -> None:
        self.tokens, self.audit = directory / "tokens", directory / "audit.log"
        self.tokens.write_text(TOKENS)
        self._stderr = (directory / "stderr").open("w")
        command = [sys.executable, "-m", "penstock.cli.main", "hub", "--listen", "127.0.0.1:0"]
        command += ["--token-file", str(self.tokens), "--audit-file", str(self.audit)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._stderr, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()

    def replace_tokens(self, text: str) -> None:
        new = self.tokens.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.tokens)

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(20) == 0
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._stderr.close()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[GuardedHub]:
    made = GuardedHub(tmp_path)
    yield made
    made.close()


def join_as_liar(stack: ExitStack, hub: GuardedHub, token: str) -> HubClient:
    client = stack.enter_context(HubClient.connect(hub.url, token))
    client.hello(Hello(member=client.member, host="h", doors=("unix:///d",)))
    return client


def standing(fleet: ps.Fleet, member: str) -> MemberStatus:
    return next(one for one in fleet.member.hub.status("m").members if one.member == member)


def test_false_fault_report_excludes_holder_only_for_reporter(
    hub: GuardedHub, small_checkpoint: Path, expected_tensors
) -> None:
    """Two fake ids with one token once excluded a holder for all readers for 600 s, as did another model's token."""
    with ExitStack() as stack:
        holder = stack.enter_context(ps.join("m", connection=ps.ConnectionSettings(hub=hub.url, token=FLEET)))
        holder.fetch({}, fallback=small_checkpoint)
        key = holder.member.weights[0].key
        for _ in range(5):
            liar = join_as_liar(stack, hub, LIAR)
            liar.complain(FaultReport(member=liar.member, of=holder.member.id, key=key, fault="wrong bytes"))
        stranger = join_as_liar(stack, hub, OTHER)
        complaint = FaultReport(member=stranger.member, of=holder.member.id, key=key, fault="wrong bytes")
        with pytest.raises(PermissionDenied, match="may not access m"):
            stranger.complain(complaint)
        assert standing(holder, holder.member.id).complaints == 5
        found: dict[str, torch.Tensor] = {}
        reader = stack.enter_context(ps.join("m", connection=ps.ConnectionSettings(hub=hub.url, token=FLEET)))
        report = reader.fetch(found, fallback=small_checkpoint)
        assert_same(found, expected_tensors)
        assert report.storage_bytes == 0, report.nbytes_by_path
        assert not any("demoted" in line for line in reader.member.hub.why(_why()).lines)


def test_readers_abandon_holder_with_wrong_digests(
    hub: GuardedHub, checkpoint_with_manifest: Path, expected_tensors
) -> None:
    theirs = {name: tensor.clone() for name, tensor in expected_tensors.items()}
    theirs[min(theirs)].view(-1).view(torch.uint8)[3] ^= 1
    with ExitStack() as stack:
        first = stack.enter_context(ps.join("m", connection=ps.ConnectionSettings(hub=hub.url, token=FLEET)))
        key = first.fetch({}, fallback=checkpoint_with_manifest).key
        revision = first.member.weights[0].identity.revision
        bad = stack.enter_context(ps.join("m", connection=ps.ConnectionSettings(hub=hub.url, token=SECOND)))
        assert bad.offer(theirs, revision=revision) == key
        first.leave()
        reader = stack.enter_context(ps.join("m", connection=ps.ConnectionSettings(hub=hub.url, token=FLEET)))
        found: dict[str, torch.Tensor] = {}
        report = reader.fetch(found, fallback=checkpoint_with_manifest)
        assert_same(found, expected_tensors)
        assert any("differ from the manifest's" in fault for fault in report.faults), report.faults
        late = stack.enter_context(ps.join("m", connection=ps.ConnectionSettings(hub=hub.url, token=LIAR)))
        weights: dict[str, torch.Tensor] = {}
        late.fetch(weights, fallback=checkpoint_with_manifest)
        assert_same(weights, expected_tensors)
        # One reader's complaint affects no other reader.
        assert not any("demoted" in line for line in reader.member.hub.why(_why()).lines)


def _why():
    from penstock.hub.messages import WhyRequest

    return WhyRequest(model="m")


def test_revoked_token_is_refused_and_its_members_removed(
    hub: GuardedHub, small_checkpoint: Path, expected_tensors
) -> None:
    with ExitStack() as stack:
        revoked = join_as_liar(stack, hub, LIAR)
        holder = stack.enter_context(ps.join("m", connection=ps.ConnectionSettings(hub=hub.url, token=FLEET)))
        holder.fetch({}, fallback=small_checkpoint)
        revoked.beat(revoked.member, Beat(holdings=(holder.member.weights[0].status(),)))
        hub.replace_tokens(TOKENS.replace(f"{LIAR} m\n", ""))
        with pytest.raises(PermissionDenied, match="does not know the token"):
            revoked.beat(revoked.member, Beat())
        with pytest.raises(PermissionDenied, match="does not know the token"):
            revoked.status("m")
        deadline = time.monotonic() + 20
        while any(one.member == revoked.member for one in holder.member.hub.status("m").members):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        hub.replace_tokens(TOKENS)  # the token is accepted again, and the member must register
        with pytest.raises(UnknownMember):
            revoked.beat(revoked.member, Beat())
        hub.tokens.write_text("short\n")  # an invalid file changes nothing and is logged
        hub.process.send_signal(signal.SIGHUP)
        while "The tokens read before stay valid" not in (hub.tokens.parent / "stderr").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert revoked.status("m").members
        lines = hub.audit.read_text().splitlines()
    assert any("event=unauthorized path='/v1/status'" in line for line in lines)
    assert any(f"event=expelled member={revoked.member} caller=token:" in line for line in lines)
    assert hub.audit.stat().st_mode & 0o777 == 0o600
    assert not any(token in "".join(lines) for token in (FLEET, LIAR, OTHER))
