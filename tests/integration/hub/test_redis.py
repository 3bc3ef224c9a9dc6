"""Two hubs on one Redis: each chunk is assigned once, both accept each other's grants, and Redis may fail."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("redis")
pytest.importorskip("starlette")
pytest.importorskip("httpx")

from tests.support import redis_server
from tests.support.hubs import IDENTITY, chunks, key_state

from penstock.errors import ConfigError, HubUnavailable, PermissionDenied, UnknownMember
from penstock.hub.client import HubClient
from penstock.hub.grants import GrantChecker
from penstock.hub.messages import Beat, ClaimRequest, Hello, UpstreamsRequest
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import RedisStore

pytestmark = pytest.mark.skipif(redis_server.missing() is not None, reason=str(redis_server.missing()))
BEAT_S = 0.2


@pytest.fixture
def redis(tmp_path_factory):
    with redis_server.RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


class Lives:
    """Members' clients of one hub, by name."""

    def __init__(self, url: str) -> None:
        self.url, self._open = url, dict[str, HubClient]()

    def __getitem__(self, name: str) -> HubClient:
        if name not in self._open:
            self._open[name] = HubClient.connect(self.url, timeout_s=5, life=name)
        return self._open[name]

    def close(self) -> None:
        for hub in self._open.values():
            hub.close()


@pytest.fixture
def hubs(redis, tmp_path, request):
    """Clients of two hubs. A parameter is the length of their heartbeat interval."""
    running, clients, stores = [], [], []
    beat_s = getattr(request, "param", BEAT_S)
    for number in range(2):
        stores.append(RedisStore(redis.url))
        directory = Directory(stores[-1], fresh=number == 0, beat_s=beat_s, ttl_s=10.0)
        running.append(HubThread(directory, bind(f"unix://{tmp_path}/hub{number}.sock", Auth())))
        running[-1].start()
        clients.append(Lives(running[-1].url))
    time.sleep(2 * beat_s)
    yield clients
    for one in (*clients, *stores):
        one.close()
    for hub in running:
        hub.stop()


def hello(hub: HubClient):
    return hub.hello(Hello(member=hub.member, host=f"host-{hub.member}", doors=(f"unix:///{hub.member}",)))


def announce(hub: HubClient, have) -> None:
    hello(hub)
    hub.beat(hub.member, Beat(holdings=(key_state(have),)))


def claim(hub: HubClient, have=(), *, ask: bool = True):
    return hub.claim(ClaimRequest(member=hub.member, holding=key_state(have), ask=ask))


def claim_when_ready(hub: HubClient, have=()):
    """Make a claim, and repeat it while the hub considers itself new.

    Its interval is short and the machine may be busy.
    """
    deadline = time.monotonic() + 20
    while "the hub is new" in (reply := claim(hub, have)).why:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return reply.ranges


def test_each_chunk_is_assigned_once(hubs) -> None:
    members = [f"m{number}" for number in range(6)]
    for member in members:
        hello(hubs[0][member])
    claim_when_ready(hubs[0]["m0"])
    claim(hubs[0]["m0"], ask=False)
    given: dict[str, list[int]] = {member: [] for member in members}

    def read(number: int) -> None:
        mine = given[members[number]]
        for turn in range(30):
            have = tuple((chunk, chunk + 1) for chunk in sorted(mine))
            mine += sorted(chunks(claim_when_ready(hubs[(number + turn) % 2][members[number]], have)))

    threads = [threading.Thread(target=read, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(chunk for mine in given.values() for chunk in mine) == list(range(100))


def test_hubs_share_state_through_redis(hubs) -> None:
    w, a = hubs[0]["w"], hubs[1]["a"]
    welcome = hello(a)
    grants = GrantChecker(welcome.grant_key, w.member)
    hello(w)
    w.beat(w.member, Beat(holdings=(key_state(((0, 100),), grant_epoch=grants.epoch()),)))
    (upstream,) = a.upstreams(UpstreamsRequest(member=a.member, holding=key_state())).upstreams
    assert upstream.member == w.member
    assert hello(w).grant_key == welcome.grant_key
    grants.check(upstream.grant, key=IDENTITY.key(), reader=a.member)
    with pytest.raises(PermissionDenied, match="not member"):
        a.leave(w.member)
    hubs[1]["w"].leave(w.member)
    deadline = time.monotonic() + 20
    while a.upstreams(UpstreamsRequest(member=a.member, holding=key_state())).upstreams:
        assert time.monotonic() < deadline


@pytest.mark.parametrize("hubs", [2.0], indirect=True, ids=["slow beats"])  # the hub is new for one interval
def test_hub_recovers_after_redis_restarts_empty(hubs, redis) -> None:
    a, b = hubs[0]["a"], hubs[1]["b"]
    announce(a, ((0, 40),))
    announce(b, ())
    assert claim_when_ready(b)
    redis.kill()
    with HubClient.connect(hubs[0].url, timeout_s=1.0) as hasty:
        deadline, said = time.monotonic() + 20, ""
        while "Redis" not in said:  # the last of its tries may have had no time for an answer
            assert time.monotonic() < deadline, said
            with pytest.raises(HubUnavailable) as caught:
                hasty.status()
            said = str(caught.value)
    redis.start()
    for hub in (a, b):
        with pytest.raises(UnknownMember):
            hub.beat(hub.member, Beat())
    announce(b, ())
    reply = claim(b)
    assert reply.ranges == () and "new" in reply.why
    announce(a, ((0, 40),))
    assert min(chunks(claim_when_ready(b))) == 40


def test_request_waits_for_paused_redis(hubs, redis) -> None:
    a = hubs[0]["a"]
    announce(a, ())
    redis.pause()
    resume = threading.Timer(1.0, redis.resume)
    resume.start()
    began = time.monotonic()
    a.beat(a.member, Beat())
    assert time.monotonic() - began > 0.5  # the request waited until Redis responded after a second
    resume.join()


def test_redis_error_messages_omit_password() -> None:
    with pytest.raises(ConfigError) as caught:
        RedisStore("http://user:secret@host")
    assert "secret" not in str(caught.value)
    store = RedisStore("redis://:secret@127.0.0.1:1")
    with pytest.raises(HubUnavailable) as away:
        store.read("x")
    assert "secret" not in str(away.value)
    store.close()


def started(*options: str, environ: dict[str, str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock.cli.main", "hub", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **environ}, **pipes)


@pytest.mark.parametrize("how", ["option", "environment", "url"])
def test_redis_password_is_read_from_file_or_environment(how, tmp_path, tmp_path_factory) -> None:
    file = tmp_path / "password"
    file.write_text("a-secret-of-redis\n")
    listen = ["--listen", f"unix://{tmp_path}/hub"]
    with redis_server.RedisServer(tmp_path_factory.mktemp("redis"), password="a-secret-of-redis") as server:
        options, environ = {
            "option": (["--redis", server.url, "--redis-password-file", str(file)], {}),
            "environment": (["--redis", server.url], {"PENSTOCK_REDIS_PASSWORD_FILE": str(file)}),
            "url": ([], {"PENSTOCK_REDIS_URL": server.url.replace("unix://", "unix://:a-secret-of-redis@")}),
        }[how]
        hub = started(*listen, *options, environ=environ)
        assert hub.stdout is not None
        try:
            with HubClient.connect(hub.stdout.readline().strip(), life="w") as client:
                client.hello(Hello(member=client.member, host="h", doors=("unix:///door",)))
            shown = Path(f"/proc/{hub.pid}/cmdline").read_bytes()
        finally:
            hub.terminate()
            said = hub.communicate(timeout=20)
        assert b"a-secret" not in shown and "a-secret" not in "".join(said)


@pytest.mark.parametrize("url", ["redis://:a-secret@127.0.0.1:1", "redis://127.0.0.1:1?password=a-secret"])
def test_redis_password_on_command_line_is_refused(url, tmp_path) -> None:
    hub = started("--listen", f"unix://{tmp_path}/hub", "--redis", url, environ={})
    out, err = hub.communicate(timeout=60)
    assert hub.returncode == 2 and "--redis-password-file" in err
    assert "a-secret" not in out + err
