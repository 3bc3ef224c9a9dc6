"""Requests for maps of sources, which are used if the sources and the version are right."""

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
from penstock.sync.receive.sources import LinkRequests
from penstock.transfer.blame import SourceFailed


class Members:
    """A `Membership` whose members answer at once; a map is the version's number.

    Attributes:
        asked: member and version of each request, in order.
        missing: members that have begun no version yet.
        lost: members that are gone.
        broken: members whose request fails by an error that only a bug raises.

    Args:
        threads: that send the requests to them.
    """

    def __init__(self, threads: KeptThreads) -> None:
        self.threads = threads
        self.asked: list[tuple[str, int]] = []
        self.missing: set[str] = set()
        self.lost: set[str] = set()
        self.broken: dict[str, Exception] = {}
        self._changed = threading.Condition()

    def await_asked(self, count: int) -> None:
        """Wait until this many members have been asked."""
        with self._changed:
            assert self._changed.wait_for(lambda: len({member for member, _ in self.asked}) >= count, 10)

    def ask(self, member: str, question: Callable[[Any], Any], *, channel: str) -> Any:
        assert channel == "map"

        def version_map(version: int, wait_s: float) -> int:
            with self._changed:
                self.asked.append((member, version))
                self._changed.notify_all()
            if member in self.broken:
                raise self.broken[member]
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


def test_links_to_requested_sources_are_returned(members: Members) -> None:
    with requests(members, ["a", "b"], 3) as early:
        links = early.take(["b", "a"], 3)
    assert list(links) == ["b", "a"]
    assert all((link.member, link.map, link.same_host) == (name, 3, True) for name, link in links.items())
    assert sorted(members.asked) == [("a", 3), ("b", 3)]


@pytest.mark.parametrize(("names", "version"), [(["a"], 3), (["a", "c"], 3), (["a", "b"], 4)])
def test_different_sources_or_version_request_new_links(members: Members, names: list[str], version: int) -> None:
    with requests(members, ["a", "b"], 3) as early:
        links = early.take(names, version)
    assert {name: cast("int", link.map) for name, link in links.items()} == dict.fromkeys(names, version)
    assert set(members.asked) >= {(name, version) for name in names}


def test_empty_source_list_requests_no_links(members: Members) -> None:
    with requests(members, [], 3) as early:
        assert early.take([], 3) == {}
    assert members.asked == []


def test_late_source_is_awaited_until_deadline(members: Members) -> None:
    members.missing = {"a"}
    timer = threading.Timer(0.1, members.missing.clear)
    timer.start()
    with requests(members, ["a"], 3) as early:
        assert early.take(["a"], 3)["a"].member == "a"
    members.missing = {"a"}
    with requests(members, ["a"], 3, stall_s=0.05) as early, pytest.raises(SourceFailed) as caught:
        early.take(["a"], 3)
    assert isinstance(caught.value.error, SourceStalled)


def test_lost_source_error_names_member(members: Members) -> None:
    members.lost = {"b"}
    with requests(members, ["a", "b"], 3) as early, pytest.raises(SourceFailed) as caught:
        early.take(["a", "b"], 3)
    assert caught.value.member == "b" and isinstance(caught.value.error, PeerLost)


def test_unused_link_requests_are_abandoned(members: Members) -> None:
    # More members than threads, and no member has begun the version.
    names = [f"m{number}" for number in range(40)]
    members.missing = set(names)
    with requests(members, names, 3, stall_s=60) as early:
        members.await_asked(16)
    links = [call.done for call in early._links.values()]
    assert sum(link.cancelled() for link in links) >= 40 - 16
    for link in links:
        if not link.cancelled():
            assert isinstance(link.exception(10), SourceFailed)
    assert len({member for member, _ in members.asked}) <= 16


def test_unexpected_link_error_reaches_caller(members: Members) -> None:
    class Broken(Exception):
        pass

    members.broken = {"b": Broken("a bug"), "c": IndexError("another")}
    with requests(members, ["a", "b", "c", "d"], 3) as early:
        for name, kind in (("b", Broken), ("c", IndexError)):
            with pytest.raises(kind):
                early._links[name].done.result(10)
        assert {early._links[name].done.result(10).member for name in "ad"} == {"a", "d"}


def test_link_thread_continues_after_error(members: Members, refuse_thread: Callable[[str], None]) -> None:
    members.broken = {"a": IndexError("a bug")}
    # The only thread waits already, and no further thread can start.
    call = members.threads.start(lambda: None, "penstock-test")
    assert call is not None
    call.join(10)
    refuse_thread("penstock-maps")
    with requests(members, ["a", "b", "c"], 3) as early:
        assert [early._links[name].done.result(10).member for name in "bc"] == ["b", "c"]
