"""Maps of sources, requested beside other work: used if they are of the right sources and version, and else anew."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.engine.threads import KeptThreads
from penstock.errors import NotFound, PeerLost, SourceStalled
from penstock.sync.membership import Membership
from penstock.sync.receive.sources import LinkRequests, SourceFailed


class Members:
    """A `Membership` whose members answer at once; a map is the version's number.

    Attributes:
        asked: member and version of each request, in order.
        missing: members that have begun no version yet.
        lost: members that are gone.

    Args:
        threads: that send the requests to them.
    """

    def __init__(self, threads: KeptThreads) -> None:
        self.threads = threads
        self.asked: list[tuple[str, int]] = []
        self.missing: set[str] = set()
        self.lost: set[str] = set()

    def ask(self, member: str, question: Callable[[Any], Any], *, channel: str) -> Any:
        assert channel == "map"

        def version_map(version: int, wait_s: float) -> int:
            self.asked.append((member, version))
            if member in self.lost:
                raise PeerLost("gone")
            if member in self.missing:
                time.sleep(0.01)
                raise NotFound("not begun")
            return version

        return question(SimpleNamespace(version_map=version_map, is_on_host=True))


@pytest.fixture
def members() -> Iterator[Members]:
    with KeptThreads() as threads:
        yield Members(threads)


def requests(members: Members, names: list[str], version: int, stall_s: float = 5.0) -> LinkRequests:
    return LinkRequests(cast("Membership", members), names, version, stall_s, members.threads)


def test_what_was_requested_is_taken(members: Members) -> None:
    with requests(members, ["a", "b"], 3) as early:
        links = early.take(["b", "a"], 3)
    assert list(links) == ["b", "a"]
    assert all((link.member, link.map, link.same_host) == (name, 3, True) for name, link in links.items())
    assert sorted(members.asked) == [("a", 3), ("b", 3)]


@pytest.mark.parametrize(("names", "version"), [(["a"], 3), (["a", "c"], 3), (["a", "b"], 4)])
def test_other_sources_or_another_version_are_requested_anew(members: Members, names: list[str], version: int) -> None:
    with requests(members, ["a", "b"], 3) as early:
        links = early.take(names, version)
    assert {name: cast("int", link.map) for name, link in links.items()} == dict.fromkeys(names, version)
    assert set(members.asked) >= {(name, version) for name in names}


def test_without_sources_nothing_is_requested(members: Members) -> None:
    with requests(members, [], 3) as early:
        assert early.take([], 3) == {}
    assert members.asked == []


def test_a_source_that_begins_late_is_waited_for_up_to_the_deadline(members: Members) -> None:
    members.missing = {"a"}
    timer = threading.Timer(0.1, members.missing.clear)
    timer.start()
    with requests(members, ["a"], 3) as early:
        assert early.take(["a"], 3)["a"].member == "a"
    members.missing = {"a"}
    with requests(members, ["a"], 3, stall_s=0.05) as early, pytest.raises(SourceFailed) as caught:
        early.take(["a"], 3)
    assert isinstance(caught.value.error, SourceStalled)


def test_a_source_that_is_gone_is_named(members: Members) -> None:
    members.lost = {"b"}
    with requests(members, ["a", "b"], 3) as early, pytest.raises(SourceFailed) as caught:
        early.take(["a", "b"], 3)
    assert caught.value.member == "b" and isinstance(caught.value.error, PeerLost)


def test_what_is_not_taken_is_given_up(members: Members) -> None:
    members.missing = {"a"}
    with requests(members, ["a"], 3, stall_s=60):
        time.sleep(0.05)
    time.sleep(0.1)
    num_asked = len(members.asked)
    assert num_asked > 1
    time.sleep(0.1)
    assert len(members.asked) == num_asked
