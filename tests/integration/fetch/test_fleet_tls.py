"""Members that present certificates to each other: addresses and weights use TLS, and strangers are rejected."""

from __future__ import annotations

import http.client
import socket
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest
import torch
from tests.support.authority import Authority

import penstock as ps
from penstock.errors import ConfigError, PenstockError
from penstock.hub.auth import MemberTls
from penstock.transport.protocol import decode

TOKEN = "all-models-0123456789"


@pytest.fixture
def authority(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Authority:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
    monkeypatch.setenv("PENSTOCK_STALL_S", "6")
    made = Authority(tmp_path)
    show(monkeypatch, made.ca_file, *made.sign("member"))
    return made


def show(environment: pytest.MonkeyPatch, ca_file: Path, certificate: Path, key: Path) -> None:
    environment.setenv("PENSTOCK_CA_FILE", str(ca_file))
    environment.setenv("PENSTOCK_CERT_FILE", str(certificate))
    environment.setenv("PENSTOCK_KEY_FILE", str(key))


def weights() -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.arange(i, i + 400_000, dtype=torch.int32) for i in range(4)}


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0"])
def test_tls_fetch_rejects_unknown_clients(authority: Authority, monkeypatch: pytest.MonkeyPatch, listen: str) -> None:
    if listen.startswith("[") and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    found: dict[str, torch.Tensor] = {}
    with ps.join("m", connection=ps.ConnectionSettings(listen=listen, transports=["http"])) as holder:
        holder.offer(weights())
        (door,) = [one for one in holder.member.server.addresses if not one.startswith("unix")]
        assert door.startswith("https://")
        (region, *_) = holder.member.weights[0].map().regions
        assert msgspec.msgpack.decode(decode(region["http"]).payload)["is_tls"]
        monkeypatch.setattr("penstock.peer.member.host_id", lambda: "another host")
        with ps.join("m", connection=ps.ConnectionSettings(transports=["http"])) as reader:
            report = reader.fetch(found)
        assert list(report.nbytes_by_path) == [f"http <- {holder.member.id[:8]}"]
        with monkeypatch.context() as environment:
            show(environment, authority.ca_file, *authority.stranger("stranger"))
            with (
                ps.join("m", connection=ps.ConnectionSettings(transports=["http"])) as stranger,
                pytest.raises(PenstockError),
            ):
                stranger.fetch({}, timeout_s=1.0)
        url = urlsplit(door)
        blind = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
        for connection in (
            http.client.HTTPConnection(url.hostname, url.port, timeout=10),
            http.client.HTTPSConnection(url.hostname, url.port, timeout=10, context=blind),
        ):
            with pytest.raises((OSError, http.client.HTTPException)):
                connection.request("GET", "/v1/alive")
                connection.getresponse()
            connection.close()
    assert {name: tensor.tolist()[:3] for name, tensor in found.items()} == {
        f"t{i}": [i, i + 1, i + 2] for i in range(4)
    }


def test_public_listen_address_accepts_certificates(authority: Authority, tmp_path: Path) -> None:
    from penstock.peer.server import PeerServer

    tls = MemberTls.read()
    assert tls is not None
    with pytest.raises(ConfigError, match="cannot listen on"):  # It must not be open to strangers.
        PeerServer.start(tmp_path / "door.sock", lambda _: None, listen="192.0.2.1:0", tls=tls.server)


def test_invalid_certificate_files_are_refused(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, authority.ca_file, authority.ca_file, authority.sign("other")[1])
    with pytest.raises(ConfigError, match="certificate"):
        ps.join("m")
    monkeypatch.delenv("PENSTOCK_CA_FILE")
    assert MemberTls.read() is None
