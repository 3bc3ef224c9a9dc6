"""A member that lies about its address and records its requests learns nothing that is useful elsewhere."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from tests.support.compare import assert_same

import penstock as ps
from penstock.errors import PenstockError, PlanError
from penstock.hub.client import HubClient
from penstock.hub.messages import Beat, Hello, HoldingMap, SyncState, Upstream
from penstock.peer.client import PeerClient
from penstock.peer.member import host_id
from penstock.transport.protocol import decode, encode
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore

OPERATORS, LLAMA = "operators-token-0123456789", "llama-only-token-0123456789"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="pt-"))
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(directory))
    monkeypatch.setenv("PENSTOCK_STALL_S", "6")
    monkeypatch.setattr("penstock.holding.weight_layout.CHUNK_BYTES", 256 << 10)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "tokens").write_text(f"{OPERATORS}\n{LLAMA} llama*\n")
    auth = Auth.of(token_file=tmp_path / "tokens")
    running = HubThread(Directory(MemoryStore(), fresh=True), bind("127.0.0.1:0", auth), auth)
    running.start()
    yield running.url
    running.stop()


class Recorder:
    """A listener that keeps every byte it receives, and answers each request with 404."""

    def __init__(self, listener: socket.socket) -> None:
        self.received, self.num_connections = b"", 0
        self._listener = listener
        listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            with connection:
                connection.settimeout(1.0)
                try:
                    while b"\r\n\r\n" not in self.received:
                        data = connection.recv(65536)
                        if not data:
                            break
                        self.received += data
                    self.received += connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                except OSError:
                    continue

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def record() -> Iterator[Callable[..., Recorder]]:
    made: list[Recorder] = []

    def listen(path: Path | None = None) -> tuple[Recorder, int]:
        if path is None:
            listener = socket.create_server(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        else:
            listener, port = socket.socket(socket.AF_UNIX), 0
            listener.bind(str(path))
        made.append(Recorder(listener))
        return made[-1], port

    yield listen
    for one in made:
        one.close()


def claim_to_hold(hub: str, made: Path, doors: tuple[str, ...], host: str) -> HubClient:
    """Return a client that claims to hold all of `made` at these addresses."""
    with ps.join("llama-3", connection=ps.ConnectionSettings(hub=hub, token=LLAMA)) as honest:
        honest.fetch({}, fallback=str(made))
        held = honest.member.weights[0].status()
    liar = HubClient.connect(hub, LLAMA)
    liar.hello(Hello(member=liar.member, host=host, doors=doors))
    liar.beat(liar.member, Beat(holdings=(held,), syncs=(SyncState(name="llama-3", side="publisher"),)))
    return liar


def test_reader_never_sends_its_token_to_members(hub: str, small_checkpoint: Path, expected_tensors, record) -> None:
    door, port = record()
    found: dict[str, torch.Tensor] = {}
    with (
        claim_to_hold(hub, small_checkpoint, (f"http://127.0.0.1:{port}",), "elsewhere") as liar,
        ps.join("llama-3", connection=ps.ConnectionSettings(hub=hub, token=OPERATORS)) as reader,
    ):
        report = reader.fetch(found, fallback=str(small_checkpoint))
    assert_same(found, expected_tensors)
    assert any(liar.member[:8] in fault for fault in report.faults), report.faults
    assert b"POST /v1/leases" in door.received
    assert OPERATORS.encode() not in door.received and b"authorization" not in door.received.lower()


def test_subscriber_never_sends_its_token_to_members(hub: str, record) -> None:
    door, port = record()
    with HubClient.connect(hub, LLAMA) as liar:
        hello = Hello(member=liar.member, host="elsewhere", doors=(f"http://127.0.0.1:{port}",))
        state = SyncState(name="llama-3", side="publisher", epoch=liar.member, layout="0" * 32, version=1, state="open")
        connection = ps.ConnectionSettings(hub=hub, token=OPERATORS, stall_s=2.0)
        reader = ps.subscriber("llama-3", {"w": torch.zeros(8)}, connection=connection)
        with reader:
            deadline = time.monotonic() + 60
            while b"POST /v1/sync" not in door.received and time.monotonic() < deadline:
                # On a busy machine an update may end before it has asked any member, and the hub may have forgotten a
                # member that was silent for 10 s.
                liar.hello(hello)
                liar.beat(liar.member, Beat(syncs=(state,)))
                with pytest.raises(PenstockError):
                    reader.update(timeout_s=2.0)
    assert b"POST /v1/sync" in door.received
    assert OPERATORS.encode() not in door.received and b"authorization" not in door.received.lower()


@pytest.mark.parametrize("where", ["a shared directory", "another user's directory", "another program's directory"])
def test_socket_of_another_user_is_not_opened(
    hub: str, small_checkpoint: Path, expected_tensors, record, alone: Path, where: str
) -> None:
    """A false `host` made readers on that host connect to any socket, and post their token to it."""
    is_named = where != "another program's directory"
    place = alone / ("p-stranger" if is_named else "agent")
    place.mkdir(mode=0o700)
    name = "peer.sock" if is_named else "agent.1"
    door, _ = record(place / name)
    if is_named:
        (place / "alive").touch()
    if where == "a shared directory":
        place.chmod(0o755)
    elif not is_named:
        # A private socket of this user, like an SSH agent's.
        (place / name).chmod(0o600)
    elif os.geteuid():
        pytest.skip("needs root, to give a directory to another user")
    else:
        os.chown(place / name, 65534, 65534)
        os.chown(place, 65534, 65534)
    found: dict[str, torch.Tensor] = {}
    with (
        claim_to_hold(hub, small_checkpoint, (f"unix://{place}/{name}",), host_id()) as liar,
        ps.join("llama-3", connection=ps.ConnectionSettings(hub=hub, token=OPERATORS)) as reader,
    ):
        report = reader.fetch(found, fallback=str(small_checkpoint))
    assert_same(found, expected_tensors)
    assert door.num_connections == 0
    refused = "cannot connect to any address of the member"
    assert any(liar.member[:8] in fault and refused in fault for fault in report.faults), report.faults


@pytest.mark.parametrize("to", ["another address", "a Unix socket"])
def test_data_port_outside_member_host_is_refused(
    hub: str, small_checkpoint: Path, expected_tensors, record, alone: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    """A map may name any address. A reader connected to it and sent its token."""
    place = alone / "private"
    place.mkdir(mode=0o700)
    victim, port = record(place / "agent.sock" if to == "a Unix socket" else None)
    changed = {"path": str(place / "agent.sock")} if to == "a Unix socket" else {"host": "localhost", "port": port}

    def lie(honest: HoldingMap) -> HoldingMap:
        regions = []
        for offered in honest.regions:
            descriptor = decode(offered["http"])
            payload = msgspec.msgpack.encode({**msgspec.msgpack.decode(descriptor.payload), **changed})
            regions.append({"http": encode(msgspec.structs.replace(descriptor, payload=payload))})
        return msgspec.structs.replace(honest, regions=tuple(regions))

    found: dict[str, torch.Tensor] = {}
    with ps.join(
        "llama-3", connection=ps.ConnectionSettings(hub=hub, token=LLAMA, listen="127.0.0.1:0", transports=["http"])
    ) as liar:
        liar.fetch({}, fallback=str(small_checkpoint))
        holding = liar.member.weights[0]
        honest = holding.map
        vars(holding)["map"] = lambda lease: lie(honest(lease))
        monkeypatch.setattr("penstock.peer.member.host_id", lambda: "another host")
        with ps.join(
            "llama-3", connection=ps.ConnectionSettings(hub=hub, token=OPERATORS, transports=["http"])
        ) as reader:
            report = reader.fetch(found, fallback=str(small_checkpoint))
        assert_same(found, expected_tensors)
        assert any("data port" in fault for fault in report.faults), report.faults
    assert victim.num_connections == 0


@pytest.mark.parametrize(
    "door",
    [
        "http://h:99999",
        "http://[::1",
        "http://h:80/path",
        "http://user:word@h:80",
        "http://h:80?x",
        "ftp://h:80",
        "unix://relative",
        "unix:///" + "x" * 200,
        "http://h:80\n",
        "http://h h:80",
    ],
)
def test_hub_refuses_invalid_member_address(hub: str, door: str) -> None:
    with HubClient.connect(hub, LLAMA) as liar, pytest.raises(PlanError):
        liar.hello(Hello(member=liar.member, host="h", doors=(door,)))


def test_false_member_address_from_hub_is_refused() -> None:
    for door in ("unix:///proc/1/root/run/docker.sock", "http://h:99999", "gopher://h:1", "unix:///dev/null"):
        upstream = Upstream(member="m", host="h", doors=(door,), device="cpu", state="whole", num_have=0, grant=b"")
        peer = PeerClient(upstream, member="r", key="0" * 32, same_host=True, stall_s=5.0)
        with peer, pytest.raises(PenstockError, match="cannot connect to any address of the member"):
            peer.lease()
