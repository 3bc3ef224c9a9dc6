"""Members that present certificates to each other exchange versions.

Certificates from another authority are refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from tests.integration.fetch.test_fleet_tls import authority, show
from tests.integration.sync.test_models import halves, publishers, put, together
from tests.support.authority import Authority

import penstock as ps
from penstock.errors import PenstockError

__all__ = ["authority"]  # a fixture

LISTEN = ps.ConnectionSettings(listen="127.0.0.1:0", transports=["http"])


@pytest.fixture
def stack(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    numbers = itertools.count()
    # Simulate a separate host for every member, without Unix sockets and shared memory.
    monkeypatch.setattr("penstock.peer.member.host_id", lambda: f"host {next(numbers)}")
    with ExitStack() as found:
        yield found


def test_versions_sync_over_mutual_tls(stack: ExitStack, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"up": torch.arange(4096.0).view(64, 64), "norm": torch.ones(64)}
    held = [halves(tensors, rank) for rank in range(2)]
    pubs = publishers(stack, held, mode="live", connection=LISTEN)
    for pub in pubs:
        (door,) = [one for one in pub.member.server.addresses if not one.startswith("unix")]
        assert door.startswith("https://")
    mine = {name: torch.zeros_like(one) for name, one in tensors.items()}
    sub = stack.enter_context(ps.subscriber("toy", mine, connection=LISTEN))
    pubs[0].wait_subscribers(1)
    reports: list[ps.PublishReport] = []
    for version in (1, 2):
        changed = {name: one + version for name, one in tensors.items()}
        for rank in range(2):
            put(held[rank], changed, rank)
        together(
            [
                *(lambda pub=pub, v=version: reports.append(pub.publish(v)) for pub in pubs),
                lambda v=version: (sub.wait(v), sub.update()),
            ]
        )
        assert all(torch.equal(mine[name], one) for name, one in changed.items())
    assert [report.committed for report in reports] == [(sub.member.id,)] * 4
    with monkeypatch.context() as environment:
        show(environment, authority.ca_file, *authority.stranger("stranger"))
        stranger = stack.enter_context(ps.subscriber("toy", {"up": torch.zeros(64, 64)}, connection=LISTEN))
    with pytest.raises(PenstockError, match="connection to the member's server failed"):
        stranger.update(timeout_s=1.0)
    for pub in pubs:
        pub.close()
    late = {name: torch.zeros_like(one) for name, one in tensors.items()}
    report = stack.enter_context(ps.subscriber("toy", late, connection=LISTEN)).update()
    assert list(report.sources) == [sub.member.id]
    assert all(torch.equal(late[name], one) for name, one in mine.items())
