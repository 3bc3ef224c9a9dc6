"""A replica of SGLang listens on two ports: as a member of a fleet, and as a subscriber of a sync."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

pytest.importorskip("torch")

import penstock as ps
from penstock.errors import ConfigError
from penstock.spi import VersionReceiver, connection_of
from penstock_sglang.plugin import loader_options, sync_connection

OPTIONS = {"hub": "http://hub:7070", "listen": "a:7071", "data_port": 7072}


def test_sync_listens_on_free_ports_by_default() -> None:
    for rank in (0, 1):
        connection = sync_connection(OPTIONS, rank)
        assert (connection.hub, connection.listen, connection.data_port) == ("http://hub:7070", "a:0", 0)


def test_only_rank_zero_uses_configured_sync_ports() -> None:
    options = loader_options({**OPTIONS, "sync_listen": "a:7073", "sync_data_port": 7074})
    assert (sync_connection(options, 0).listen, sync_connection(options, 0).data_port) == ("a:7073", 7074)
    assert (sync_connection(options, 1).listen, sync_connection(options, 1).data_port) == ("a:0", 0)
    # The fleet's member uses its ports.
    assert connection_of(options).listen == "a:7071"


@pytest.mark.parametrize(
    "wrong", [{"sync_data_port": 7074}, {"sync_listen": 7073}, {"sync_listen": "a:1", "sync_data_port": -1}]
)
def test_invalid_sync_port_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        loader_options({"fleet": "llama", **wrong})


def test_member_and_sync_listen_on_separate_ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = loader_options({"fleet": "llama", "listen": f"127.0.0.1:{port}"})
    with (
        ps.join("llama", connection=connection_of(options)) as fleet,
        VersionReceiver("policy", connection=sync_connection(options, 0)) as receiver,
    ):
        assert fleet.member.server.addresses[-1].endswith(f":{port}")
        assert receiver.version == -1
