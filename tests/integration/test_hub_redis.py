"""Two hubs on one Redis: each chunk given once, grants of either good, and a Redis that is killed, stopped or empty."""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("redis")
pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from penstock.errors import ConfigError, HubUnavailable, UnknownMember
from penstock.fleet.auth import Auth
from penstock.fleet.client import HubClient
from penstock.fleet.directory import Directory
from penstock.fleet.grants import GrantChecker
from penstock.fleet.messages import Beat, ClaimRequest, FlightRequest, Hello
from penstock.fleet.serve import HubThread, bind
from penstock.fleet.store_redis import RedisStore
from penstock.testing import redis_server
from penstock.testing.hubs import IDENTITY, chunks, holding

pytestmark = pytest.mark.skipif(redis_server.missing() is not None, reason=str(redis_server.missing()))
BEAT_S = 0.2


@pytest.fixture
def redis(tmp_path_factory):
    with redis_server.RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def hubs(redis, tmp_path):
    """Clients of two hubs."""
    running, clients, stores = [], [], []
    for number in range(2):
        stores.append(RedisStore(redis.url))
        directory = Directory(stores[-1], fresh=number == 0, beat_s=BEAT_S, ttl_s=2.0)
        running.append(HubThread(directory, bind(f"unix://{tmp_path}/hub{number}.sock", Auth())))
        running[-1].start()
        clients.append(HubClient.connect(running[-1].url, timeout_s=5))
    time.sleep(2 * BEAT_S)
    yield clients
    for one in (*clients, *stores):
        one.close()
    for hub in running:
        hub.stop()


def hello(hub: HubClient, member: str):
    return hub.hello(Hello(member=member, host=f"host-{member}", doors=(f"unix:///{member}",)))


def announce(hub: HubClient, member: str, have) -> None:
    hello(hub, member)
    hub.beat(member, Beat(holdings=(holding(have),)))


def test_each_chunk_is_given_once(hubs) -> None:
    members = [f"m{number}" for number in range(6)]
    for member in members:
        hello(hubs[0], member)
    while "the hub is new" in hubs[0].claim(ClaimRequest(member="m0", holding=holding(), ask=True)).why:
        time.sleep(0.1)
    hubs[0].claim(ClaimRequest(member="m0", holding=holding(), ask=False))
    given: dict[str, list[int]] = {member: [] for member in members}

    def read(number: int) -> None:
        mine = given[members[number]]
        for turn in range(30):
            have = tuple((chunk, chunk + 1) for chunk in sorted(mine))
            asked = ClaimRequest(member=members[number], holding=holding(have))
            mine += sorted(chunks(hubs[(number + turn) % 2].claim(asked).ranges))

    threads = [threading.Thread(target=read, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(chunk for mine in given.values() for chunk in mine) == list(range(100))


def test_what_one_hub_was_told_the_other_knows(hubs) -> None:
    announce(hubs[0], "w", ((0, 100),))
    welcome = hello(hubs[1], "a")
    (upstream,) = hubs[1].flight(FlightRequest(member="a", holding=holding())).upstreams
    assert upstream.member == "w"
    assert hello(hubs[0], "w").grant_key == welcome.grant_key
    GrantChecker(welcome.grant_key, "w", now=welcome.now).check(upstream.grant, key=IDENTITY.key(), reader="a")
    hubs[0].leave("w")
    deadline = time.monotonic() + 5
    while hubs[1].flight(FlightRequest(member="a", holding=holding())).upstreams:
        assert time.monotonic() < deadline


def test_redis_killed_and_started_empty(hubs, redis) -> None:
    announce(hubs[0], "a", ((0, 40),))
    announce(hubs[1], "b", ())
    assert hubs[1].claim(ClaimRequest(member="b", holding=holding())).ranges
    redis.kill()
    hasty = HubClient.connect(hubs[0]._line.reach(), timeout_s=0.5)
    with hasty, pytest.raises(HubUnavailable, match="Redis"):
        hasty.status()
    redis.start()
    for hub, member in zip(hubs, "ab", strict=True):
        with pytest.raises(UnknownMember):
            hub.beat(member, Beat())
    announce(hubs[1], "b", ())
    reply = hubs[1].claim(ClaimRequest(member="b", holding=holding()))
    assert reply.ranges == () and "new" in reply.why
    announce(hubs[0], "a", ((0, 40),))
    deadline = time.monotonic() + 10
    while not reply.ranges:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        reply = hubs[1].claim(ClaimRequest(member="b", holding=holding()))
    assert min(chunks(reply.ranges)) == 40


def test_a_question_waits_for_a_redis_that_is_stopped_for_a_moment(hubs, redis) -> None:
    announce(hubs[0], "a", ())
    redis.pause()
    resume = threading.Timer(1.0, redis.resume)
    resume.start()
    hubs[0].beat("a", Beat())
    resume.join()


def test_addresses_that_are_none() -> None:
    with pytest.raises(ConfigError) as caught:
        RedisStore("http://user:secret@host")
    assert "secret" not in str(caught.value)
    store = RedisStore("redis://:secret@127.0.0.1:1")
    with pytest.raises(HubUnavailable) as away:
        store.read("x")
    assert "secret" not in str(away.value)
    store.close()
