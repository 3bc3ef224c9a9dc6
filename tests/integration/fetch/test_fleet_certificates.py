"""Mutual TLS: the certificate identifies a member, both to the hub and at its own addresses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.authority import Authority
from tests.support.compare import assert_same

import penstock as ps
from penstock.errors import ConfigError, PermissionDenied
from penstock.hub.client import HubClient
from penstock.hub.messages import Beat, Hello
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore


@pytest.fixture(autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    monkeypatch.setenv("PENSTOCK_STALL_S", "10")
    monkeypatch.setattr("penstock.holding.weight_layout.CHUNK_BYTES", 256 << 10)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def hub(authority: Authority) -> Iterator[str]:
    certificate, key = authority.sign("hub")
    auth = Auth.of(certificate=certificate, private_key=key, client_ca=authority.ca_file)
    running = HubThread(Directory(MemoryStore(), fresh=True), bind("127.0.0.1:0", auth), auth)
    running.start()
    yield running.url
    running.stop()


def show(monkeypatch: pytest.MonkeyPatch, authority: Authority, name: str) -> None:
    certificate, key = authority.sign(name)
    monkeypatch.setenv("PENSTOCK_CA_FILE", str(authority.ca_file))
    monkeypatch.setenv("PENSTOCK_CERT_FILE", str(certificate))
    monkeypatch.setenv("PENSTOCK_KEY_FILE", str(key))


def test_member_requests_with_different_certificate_are_rejected(hub: str, authority: Authority) -> None:
    first, other, renewed = (authority.sign(name) for name in ("first", "other", "first"))
    ca_file, life = authority.ca_file, "0123456789abcdef"
    with HubClient.connect(hub, ca_file=ca_file, certificate=first, life=life) as member:
        member.hello(Hello(member=member.member, host="h", doors=("unix:///d",)))
        member.beat(member.member, Beat())
        with HubClient.connect(hub, ca_file=ca_file, certificate=other, life=life) as thief:
            for speak in (
                lambda: thief.beat(member.member, Beat()),
                lambda: thief.hello(Hello(member=member.member, host="h", doors=("unix:///d",))),
                lambda: thief.leave(member.member),
            ):
                with pytest.raises(PermissionDenied, match="a different certificate"):
                    speak()
        with HubClient.connect(hub, ca_file=ca_file, certificate=renewed, life=life) as same:
            same.beat(member.member, Beat())


def test_server_certificate_of_different_member_is_rejected(
    hub: str, authority: Authority, small_checkpoint: Path, expected_tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, torch.Tensor] = {}
    show(monkeypatch, authority, "holder")
    with ps.join("m", connection=ps.ConnectionSettings(hub=hub, listen="127.0.0.1:0", transports=["http"])) as holder:
        holder.fetch({}, fallback=small_checkpoint)
        (door,) = [one for one in holder.member.server.addresses if one.startswith("https")]
        show(monkeypatch, authority, "reader")
        monkeypatch.setattr("penstock.peer.member.host_id", lambda: "another host")
        with ps.join("m", connection=ps.ConnectionSettings(hub=hub, transports=["http"])) as reader:
            report = reader.fetch(found, timeout_s=20.0)
        assert_same(found, expected_tensors)
        assert list(report.nbytes_by_path) == [f"http <- {holder.member.id[:8]}"]
        # A member whose addresses lead to another member would be shown grants and answer for that member.
        liar = HubClient.connect(hub, ca_file=authority.ca_file, certificate=authority.sign("liar"))
        liar.hello(Hello(member=liar.member, host="elsewhere", doors=(door,)))
        liar.beat(liar.member, Beat(holdings=(holder.member.weights[0].status(),)))
        holder.member.hub.leave(holder.member.id)
        with liar, ps.join("m", connection=ps.ConnectionSettings(hub=hub, transports=["http"])) as reader:
            report = reader.fetch(found, fallback=small_checkpoint)
        assert any("the peer's certificate names" in fault for fault in report.faults), report.faults


def test_plain_http_to_tls_hub_error_suggests_https(hub: str) -> None:
    with HubClient.connect(hub.replace("https://", "http://")) as client:
        begun = time.monotonic()
        with pytest.raises(ConfigError, match="speaks TLS") as caught:
            client.status()
    assert time.monotonic() - begun < 3.0
    assert "https://" in str(caught.value.hint)
