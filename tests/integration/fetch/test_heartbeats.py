"""The first request of a fetch replaces a heartbeat of the member, once between two heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from tests.integration.conftest import Host

import penstock as ps
from penstock.hub.messages import Beat, BeatReply
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore

BEAT_S = 1.0
"""Heartbeat interval. Members send heartbeats after 0.75 to 1 times this."""


class NotedBeats(Directory):
    """A hub that records the times of heartbeats."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), fresh=True, beat_s=BEAT_S, ttl_s=10.0)
        self.beats: list[float] = []

    def beat(self, member: str, beat: Beat, *more: object) -> BeatReply:
        self.beats.append(time.monotonic())
        return super().beat(member, beat, *more)  # type: ignore[arg-type]

    def wait_for(self, is_there: Callable[[list[float]], bool]) -> None:
        deadline = time.monotonic() + 30
        while not is_there(self.beats):
            assert time.monotonic() < deadline, "no heartbeat came"
            time.sleep(0.01)


def test_first_request_for_upstreams_replaces_one_heartbeat(
    host: Host, expected_tensors: dict[str, torch.Tensor]
) -> None:
    hub, url = NotedBeats(), f"unix://{host.directory}/own.sock"
    server = HubThread(hub, bind(url, Auth()))
    server.start()
    try:
        with ps.join("m", connection=url) as fleet:
            fleet.offer(expected_tensors)
            member = fleet.member
            weights = member.weights[0]
            # Wait for a regular heartbeat after the heartbeats at the start.
            hub.wait_for(lambda beats: len(beats) > 3)
            time.sleep(0.4 * BEAT_S)
            requested = time.monotonic()
            member.upstreams(weights, can_read_storage=False, is_first=True)
            hub.wait_for(lambda beats: beats[-1] > requested)
            # Without the request, it would have arrived at most 0.6 s later.
            assert hub.beats[-1] - requested > 0.7 * BEAT_S
            # Other requests do not delay a heartbeat, and neither does a second first request before it.
            for is_first in (False, True):
                begun = time.monotonic()
                while hub.beats[-1] < begun:
                    member.upstreams(weights, can_read_storage=False, is_first=is_first)
                    time.sleep(0.05)
                    assert time.monotonic() < begun + 10 * BEAT_S, "heartbeats no longer come"
    finally:
        server.stop()
