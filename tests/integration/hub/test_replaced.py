"""Members whose hub is replaced by a hub that does not know them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config import ConnectionSettings
from penstock.errors import UnknownMember
from penstock.hub import messages
from penstock.hub.client import HubClient
from penstock.peer.member import REGISTRATIONS, Member
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore


class ReplacedDirectory(Directory):
    """A directory that loses the calling member before some of its requests, as a new hub does."""

    losses = 0
    requests = 0

    def sync(self, request: messages.SyncRequest) -> messages.SyncReply:
        self.requests += 1
        if self.losses > 0:
            self.losses -= 1
            self.store.write(f"member/{request.member}", None)
        return super().sync(request)


@pytest.fixture
def directory(tmp_path: Path) -> ReplacedDirectory:
    # Heartbeats would register the member too, so their interval is longer than a test.
    return ReplacedDirectory(MemoryStore(), fresh=True, beat_s=60.0, ttl_s=300.0)


@pytest.fixture
def member(directory: ReplacedDirectory, tmp_path: Path) -> Iterator[Member]:
    hub = HubThread(directory, bind(f"unix://{tmp_path}/hub", Auth()))
    hub.start()
    try:
        with Member.join(HubClient.connect(hub.url), ConnectionSettings(hub=hub.url)) as joined:
            yield joined
    finally:
        hub.stop()


@pytest.mark.parametrize("losses", [1, 2, REGISTRATIONS])
def test_hub_replaced_several_times_knows_member(directory: ReplacedDirectory, member: Member, losses: int) -> None:
    directory.losses = losses
    assert member.sync("m") == messages.SyncReply(members=())
    assert [known.member for known in directory.status().members] == [member.id]


def test_hub_that_always_forgets_raises_unknown_member(directory: ReplacedDirectory, member: Member) -> None:
    directory.losses = 1_000
    with pytest.raises(UnknownMember, match="does not know"):
        member.sync("m")
    assert directory.requests == REGISTRATIONS + 1
