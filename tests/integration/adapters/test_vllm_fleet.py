"""Several engines behind one client with a real sync. The engines have only vLLM's four routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import penstock as ps
from penstock_vllm.servers import FleetClient


class Engine:
    """The routes of `weight_transfer` with a subscriber, which receives into a staging tensor and installs it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.staging, self.live = torch.zeros(64), torch.zeros(64)
        self.listen, self.weight_version = "", ""
        self.is_updating, self.is_broken, self.is_gone = False, False, False
        self._subscriber: ps.sync.Subscriber | None = None

    def restart(self) -> None:
        """Lose the subscription and the update, as a restarted server does."""
        self._subscriber, self.is_updating = None, False

    def init_weight_transfer_engine(self, info: dict[str, Any]) -> None:
        if self.is_gone:
            raise RuntimeError("no answer")
        self.listen = info.get("listen", "")
        self._subscriber = self._stack.enter_context(
            ps.subscriber(
                info["name"], {"w": self.staging}, mode="direct", connection=ps.ConnectionSettings(stall_s=5.0)
            )
        )

    def start_weight_update(self) -> None:
        assert not self.is_updating, "vLLM refuses a second update"
        if self.is_gone or self._subscriber is None:
            raise RuntimeError("no answer" if self.is_gone else "not subscribed")
        self.is_updating = True

    def update_weights(self, info: dict[str, Any]) -> None:
        assert self.is_updating
        if self.is_broken:
            # A failed update is ended, as in vLLM.
            self.is_updating = False
            raise RuntimeError("no room")
        assert self._subscriber is not None
        self._subscriber.update(info["version"])

    def finish_weight_update(self, weight_version: str) -> None:
        assert self.is_updating
        self.is_updating = False
        self.live.copy_(self.staging)
        self.weight_version = weight_version


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def send(publisher: ps.sync.Publisher, weights: torch.Tensor, fleet: FleetClient, version: int) -> None:
    weights.fill_(version)
    publisher.publish(version)
    fleet.start_weight_update()
    fleet.update_weights({"version": version})
    fleet.finish_weight_update(weight_version=str(version))


def test_all_servers_install_version_atomically(stack: ExitStack) -> None:
    weights, engines = torch.zeros(64), {name: Engine(stack) for name in ("a", "b", "c")}
    publisher = stack.enter_context(ps.publisher("served", {"w": weights}, mode="snapshot"))
    fleet = FleetClient(engines, init_info={"b": {"listen": "127.0.0.1:0"}})
    stack.callback(fleet.close)
    fleet.init_weight_transfer_engine({"name": "served"})
    assert [engine.listen for engine in engines.values()] == ["", "127.0.0.1:0", ""]
    send(publisher, weights, fleet, 1)
    assert {(float(engine.live[0]), engine.weight_version) for engine in engines.values()} == {(1.0, "1")}
    engines["b"].is_broken = True
    with pytest.raises(ps.VersionRefused, match="version 2 was withdrawn from all 3 servers: b: no room") as caught:
        send(publisher, weights, fleet, 2)
    assert (caught.value.version, caught.value.member) == (2, "b")
    with pytest.raises(ps.ConfigError, match="no server has received a version"):
        fleet.finish_weight_update(weight_version="2")
    assert {float(engine.live[0]) for engine in engines.values()} == {1.0}
    # Servers with an open update are not asked to start another.
    engines["b"].is_broken = False
    send(publisher, weights, fleet, 3)
    assert {(float(engine.live[0]), engine.weight_version) for engine in engines.values()} == {(3.0, "3")}


def test_failed_server_is_excluded_if_allowed(stack: ExitStack) -> None:
    weights, engines = torch.zeros(64), {name: Engine(stack) for name in ("a", "b")}
    publisher = stack.enter_context(ps.publisher("served", {"w": weights}, mode="snapshot"))
    fleet = FleetClient(engines, stragglers="leave_out")
    stack.callback(fleet.close)
    fleet.init_weight_transfer_engine({"name": "served"})
    engines["a"].is_broken = True
    send(publisher, weights, fleet, 1)
    assert (float(engines["a"].live[0]), float(engines["b"].live[0])) == (0.0, 1.0)
    assert fleet.left_out == {"a": "no room"}
    engines["b"].is_broken = True
    with pytest.raises(ps.VersionRefused, match="a: no room; b: no room"):
        send(publisher, weights, fleet, 2)
    engines["a"].is_broken = engines["b"].is_broken = False
    send(publisher, weights, fleet, 3)
    assert {float(engine.live[0]) for engine in engines.values()} == {3.0} and not fleet.left_out
    with pytest.raises(ps.ConfigError, match="at least one server"):
        FleetClient({})


def test_restarted_server_subscribes_again(stack: ExitStack) -> None:
    weights, engines = torch.zeros(64), {name: Engine(stack) for name in ("a", "b")}
    publisher = stack.enter_context(ps.publisher("served", {"w": weights}, mode="snapshot"))
    fleet = FleetClient(engines)
    stack.callback(fleet.close)
    fleet.init_weight_transfer_engine({"name": "served"})
    send(publisher, weights, fleet, 1)
    # A missing server fails the version for all, and the next version succeeds once it is back.
    engines["b"].is_gone = True
    with pytest.raises(ps.VersionRefused, match="version 2 was withdrawn from all 2 servers: b: no answer"):
        send(publisher, weights, fleet, 2)
    assert {float(engine.live[0]) for engine in engines.values()} == {1.0}
    engines["b"].is_gone = False
    engines["b"].restart()
    send(publisher, weights, fleet, 3)
    assert {float(engine.live[0]) for engine in engines.values()} == {3.0}
    for engine in engines.values():
        engine.is_gone = True
    with pytest.raises(RuntimeError, match="no answer"):
        fleet.start_weight_update()
