"""A process whose hub is away at the start reads storage if it can, reports it, and joins later."""

from __future__ import annotations

import logging
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.support.compare import assert_same, by_safetensors

import penstock as ps
from penstock.peer.member import Member
from penstock.spi import engine_weights as replica
from penstock.testing.checkpoints import write_llama
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore

TOKEN = "a-token-of-this-hub-0123"


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    directory = tempfile.mkdtemp(prefix="pa-")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
    monkeypatch.setenv("PENSTOCK_STALL_S", "6")
    yield
    shutil.rmtree(directory)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_llama(tmp_path / "llama", total_bytes=2 << 20, fp8=False)
    return tmp_path / "llama"


@pytest.fixture
def connection() -> ps.ConnectionSettings:
    """Settings for a port at which nothing listens yet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    return ps.ConnectionSettings(hub=f"http://127.0.0.1:{port}", token=TOKEN)


@pytest.fixture
def start_hub(connection: ps.ConnectionSettings, tmp_path: Path) -> Iterator[Callable[[], None]]:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    auth = Auth.of(token_file=tokens)
    started: list[HubThread] = []

    def start() -> None:
        assert connection.hub is not None
        hub = HubThread(Directory(MemoryStore()), bind(connection.hub.removeprefix("http://"), auth), auth)
        hub.start()
        started.append(hub)

    yield start
    for hub in started:
        hub.stop()


def wait_until_joined(member: Member) -> None:
    deadline = time.monotonic() + 8
    while member.registration.away is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert member.registration.away is None


@pytest.mark.parametrize("is_given", [False, True])
def test_fetch_without_reachable_hub_reads_fallback(is_given: bool, connection, llama: Path, caplog) -> None:
    truth = by_safetensors(llama)
    target = {name: torch.zeros_like(tensor) for name, tensor in truth.items()} if is_given else {}
    begun = time.monotonic()
    with caplog.at_level(logging.WARNING), ps.join("m", connection=connection, timeout_s=0.3) as fleet:
        report = fleet.fetch(target, fallback=str(llama))
        assert_same(target, truth)
        # Without a fallback only the fleet has the weights.
        with pytest.raises(ps.HubUnavailable, match="refused connections"):
            fleet.fetch({}, timeout_s=0.3)
    assert time.monotonic() - begun < 6
    assert "reads from its fallback and joins the fleet later" in caplog.text
    assert [why.startswith("no hub responded: ") for why in report.why.values()] == [True]
    assert "storage is read without the fleet" in report.faults[0] and report.storage_bytes > 0


def test_member_joins_once_hub_is_reachable(connection, llama: Path, start_hub, caplog) -> None:
    with ps.join("m", connection=connection, timeout_s=0.3) as fleet:
        fleet.fetch({}, fallback=str(llama))
        with caplog.at_level(logging.WARNING):
            start_hub()
            wait_until_joined(fleet.member)
        assert "has joined the fleet" in caplog.text
        received: dict[str, torch.Tensor] = {}
        with ps.join("m", connection=connection) as second:
            report = second.fetch(received, timeout_s=5)
        assert report.storage_bytes == 0 and fleet.member.id[:8] in str(report)
        assert_same(received, by_safetensors(llama))


def test_cache_started_without_hub_joins_later(connection, llama: Path, start_hub) -> None:
    with ps.cache.WeightCache(connection=connection) as keeper:
        assert keeper.keep("m", str(llama)).storage_bytes > 0
        start_hub()
        wait_until_joined(keeper.member)
        received: dict[str, torch.Tensor] = {}
        with ps.join("m", connection=connection) as reader:
            assert reader.fetch(received, timeout_s=5).storage_bytes == 0
        assert_same(received, by_safetensors(llama))
        with ps.cache.attach("m", connection=connection) as attached:
            assert_same(dict(attached), received)


def test_engine_started_without_hub_joins_later(connection, llama: Path, start_hub, tmp_path: Path, caplog) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    options = replica.FleetOptions(fleet="m", hub=connection.hub, token_file=str(token_file))
    log = logging.getLogger("engine")
    with caplog.at_level(logging.INFO):
        fleet = replica.join(options, str(llama), log=log)
        assert fleet is not None
        loaded = dict(replica.tensors(fleet, str(llama), options, log=log))
    try:
        assert_same(loaded, by_safetensors(llama))
        assert caplog.text.count("reads from its fallback and joins the fleet later") == 1
        start_hub()
        wait_until_joined(fleet.member)
        with ps.join("m", connection=connection) as reader:
            assert reader.fetch({}, timeout_s=5).storage_bytes == 0
    finally:
        fleet.leave(0.0)


def test_missing_required_hub_raises_hub_unavailable(connection) -> None:
    with pytest.raises(ps.HubUnavailable, match="refused connections"):
        ps.join("m", connection=connection, timeout_s=0.3, needs_hub=True)


def test_join_refused_by_hub_raises(connection, start_hub) -> None:
    start_hub()
    with pytest.raises(ps.errors.PermissionDenied, match="does not know the token"):
        ps.join("m", connection=ps.ConnectionSettings(hub=connection.hub, token="a-token-of-another-hub"))
    with pytest.raises(ps.errors.PermissionDenied, match="has none"):
        ps.join("m", connection=connection.hub)


def test_long_wait_for_holder_is_logged_once(connection, start_hub, caplog) -> None:
    start_hub()
    with (
        ps.join("m", connection=connection) as fleet,
        caplog.at_level(logging.WARNING),
        pytest.raises(ps.NotFound, match="no member holds 'm' after"),
    ):
        fleet.fetch({}, timeout_s=1.5)
    assert (
        caplog.text.count("waiting for a holder of m, at most 1.5 s: no member holds it and fallback= is not set") == 1
    )
