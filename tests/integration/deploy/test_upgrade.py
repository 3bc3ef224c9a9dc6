"""Processes of the previous release and of this one in one fleet: fetch, sync, keepers, hubs, upgraded in any order.

The previous release is installed from the repository's history into an environment of its own: see `PREVIOUS` in
`tests.support.releases`, and docs/operate/upgrade.md for the promise. A failure means that a changed message broke it:
add fields with defaults, and keep what the previous release sends and reads.
"""

from __future__ import annotations

import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import redis_server, release_driver
from tests.support.compare import by_safetensors
from tests.support.releases import PREVIOUS, ROOT, Command, Driver, git, previous_release
from tests.support.releases import this_release as this

from penstock.hub.messages import PROTOCOL
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB

NAMES = ("old", "new")


@dataclass
class Fleet:
    """Start a driver of each release, with a separate directory for each test."""

    drivers: dict[str, Driver]
    directory: Path
    stack: ExitStack

    def __getitem__(self, name: str) -> Driver:
        return self.drivers[name]

    def start(self, release: str, *words: str, until: str) -> Command:
        """Start a command, which is killed at the end of the test."""
        environ = {"PENSTOCK_RUNTIME_DIR": str(self.directory), "PENSTOCK_STALL_S": "10"}
        return self.stack.enter_context(Command(self.drivers[release].release, words, environ, until))

    def start_hub(self, release: str, *words: str, name: str = "own") -> tuple[Command, str]:
        """Start a hub of a release; return its command and its address."""
        url = f"unix://{self.directory}/{name}.sock"
        return self.start(release, "hub", "--listen", url, *words, until="unix://"), url


@pytest.fixture(scope="module")
def drivers() -> Iterator[dict[str, Driver]]:
    with ExitStack() as stack:
        releases = [stack.enter_context(release) for release in (previous_release(), this())]
        yield {release.name: stack.enter_context(Driver(release, {"PENSTOCK_STALL_S": "10"})) for release in releases}


@pytest.fixture(scope="module")
def hubs(drivers: dict[str, Driver]) -> Iterator[dict[str, str]]:
    """The address of a hub of each release, shared by the tests that only use it."""
    directory = tempfile.mkdtemp(prefix="penstock-up-", dir="/tmp")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        urls = {name: f"unix://{directory}/{name}.sock" for name in NAMES}
        for name, url in urls.items():
            stack.enter_context(Command(drivers[name].release, ["hub", "--listen", url], {}, "unix://"))
        yield urls


@pytest.fixture
def fleet(drivers: dict[str, Driver]) -> Iterator[Fleet]:
    # Use a short path, because it is the path of a socket.
    directory = Path(tempfile.mkdtemp(prefix="penstock-up-", dir="/tmp"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        for driver in drivers.values():
            driver("set_environ", values={"PENSTOCK_RUNTIME_DIR": str(directory)})
        yield Fleet(drivers, directory, stack)
        # Close them before the hubs, because leaving members would wait for the hubs.
        for driver in drivers.values():
            driver("close_all")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 40 MiB in two files: three chunks."""
    directory = tmp_path_factory.mktemp("upgrade") / "m"
    write_llama(directory, total_bytes=40 * MIB, shards=2)
    return directory


@pytest.fixture(scope="module")
def wanted(model: Path) -> str:
    return release_driver.digests(by_safetensors(model))


def wait_until(holds: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def other(name: str) -> str:
    return "new" if name == "old" else "old"


def check_fetched(report: dict[str, Any], wanted: str, holder: str | None, transport: str = "") -> None:
    """Check the bits of a fetch, and that all of them came from a member, or (None) from storage."""
    assert report["digests"] == wanted and report["faults"] == []
    if holder is None:
        assert report["storage_bytes"] > 0
    else:
        assert report["storage_bytes"] == 0
        assert all(holder[:8] in path and transport in path for path in report["paths"]), report["paths"]


def test_upgrade_test_driver_imports_previous_release(drivers: dict[str, Driver]) -> None:
    old, new = drivers["old"]("about"), drivers["new"]("about")
    environment = drivers["old"].release.python.parents[1]
    assert PREVIOUS[:12] in environment.name and environment in Path(old["file"]).parents
    assert Path(new["file"]) == ROOT / "packages" / "penstock" / "src" / "penstock" / "__init__.py"
    # The installed files equal the commit's.
    installed = Path(old["file"]).parent / "hub" / "messages.py"
    assert installed.read_bytes() == git("show", f"{PREVIOUS}:src/penstock/hub/messages.py").stdout
    assert f'PROTOCOL = "{old["protocol"]}"' in installed.read_text()
    # Neighbouring releases work together, so they speak the same major version; a new one needs a release in between
    # that speaks both.
    assert old["protocol"].partition(".")[0] == PROTOCOL.partition(".")[0] == new["protocol"].partition(".")[0]


@pytest.mark.parametrize("hub", NAMES)
@pytest.mark.parametrize("holder", NAMES)
@pytest.mark.parametrize("transport", ["shm", "http"])
def test_old_and_new_members_fetch_from_each_other(
    fleet: Fleet, hubs: dict[str, str], model: Path, wanted: str, hub: str, holder: str, transport: str
) -> None:
    url, reader = hubs[hub], other(holder)
    connection = {"hub": url, "transports": [transport], "listen": "127.0.0.1:0"}
    first = fleet[holder]("join", name="a", model="m", connection=connection)
    check_fetched(fleet[holder]("fetch", name="a", fallback=str(model)), wanted, None)
    second = fleet[reader]("join", name="b", model="m", connection=connection)
    check_fetched(fleet[reader]("fetch", name="b"), wanted, first, transport)
    for driver in fleet.drivers.values():
        # Both releases read what the hub says of the other's members.
        assert set(driver("status", model="m", hub=url)) == {first, second}
        assert any(first[:8] in line for line in driver("why", model="m", hub=url))


@pytest.mark.parametrize("hub", NAMES)
@pytest.mark.parametrize("publisher", NAMES)
@pytest.mark.parametrize(
    "options",
    [{"mode": "live"}, {"mode": "snapshot"}, {"mode": "snapshot", "transforms": "cast:BF16"}],
    ids=["live", "snapshot", "cast"],
)
@pytest.mark.parametrize("transport", ["shm", "http"])
def test_versions_sync_between_old_and_new_release(
    fleet: Fleet, hubs: dict[str, str], hub: str, publisher: str, options: dict[str, str], transport: str
) -> None:
    source, targets = fleet[publisher], [fleet[other(publisher)], fleet[publisher]]
    connection = {"hub": hubs[hub], "transports": [transport], "listen": "127.0.0.1:0"}
    source("publisher", name="p", sync="policy", connection=connection, options=options)
    takes = {name: value for name, value in options.items() if name == "transforms"}
    members = [
        target("subscriber", name="s", sync="policy", connection=connection, options=takes) for target in targets
    ]
    for version in (1, 2):
        publish_and_update(source, targets, members, version, **takes)


def publish_and_update(
    source: Driver, targets: list[Driver], members: list[str], version: int, transforms: str = ""
) -> None:
    """Publish a version from one release, and check what subscribers of both get."""
    weights = release_driver.weights_of(version)
    if transforms:
        weights = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    source("publish", name="p", version=version, subscribers=len(targets))
    for target in targets:
        target.send("update", name="s", version=version)
    for target in targets:
        report = target.result()
        assert (report["version"], report["digests"]) == (version, release_driver.digests(weights))
        assert report["attempts"] == 1
    published = source("published", name="p")
    assert not published["late"] and not published["failed"]
    assert set(published["committed"]) in (set(), set(members))


@pytest.mark.parametrize("members", [pytest.param("old", id="first"), pytest.param("new", id="last")])
@pytest.mark.parametrize("hubs", [("old", "new"), ("new", "old")], ids=["upgraded", "rolled-back"])
def test_members_rejoin_hub_of_newer_release(
    fleet: Fleet, model: Path, wanted: str, members: str, hubs: tuple[str, str]
) -> None:
    hub, url = fleet.start_hub(hubs[0])
    connection = {"hub": url}
    driver, late = fleet[members], fleet[other(members)]
    holder = driver("join", name="a", model="m", connection=connection)
    check_fetched(driver("fetch", name="a", fallback=str(model)), wanted, None)
    driver("publisher", name="p", sync="policy", connection=connection, options={"mode": "live"})
    subscribers = [driver("subscriber", name="s", sync="policy", connection=connection, options={})]
    publish_and_update(driver, [driver], subscribers, 1)

    assert hub.stop() == 0
    fleet.start_hub(hubs[1])
    # Members register again by themselves, with all holdings and the same lives as before.
    wait_until(lambda: fleet["new"]("status", hub=url).get(holder) == ["m"])
    wait_until(lambda: subscribers[0] in fleet["old"]("status", hub=url))
    late("join", name="b", model="m", connection=connection)
    check_fetched(late("fetch", name="b"), wanted, holder)
    subscribers.append(late("subscriber", name="s", sync="policy", connection=connection, options={}))
    publish_and_update(driver, [driver, late], subscribers, 2)


@pytest.mark.skipif(redis_server.missing() is not None, reason=str(redis_server.missing()))
def test_old_and_new_hubs_share_redis(fleet: Fleet, model: Path, wanted: str) -> None:
    redis = fleet.stack.enter_context(redis_server.RedisServer(fleet.directory))
    urls = {name: fleet.start_hub(name, "--redis", redis.url, name=name)[1] for name in NAMES}
    for hub in NAMES:
        # Test each member with the other release's hub, then each with its own.
        at = {name: urls[other(name) if hub == "old" else name] for name in NAMES}
        holder = fleet["old"]("join", name=f"a-{hub}", model=hub, connection={"hub": at["old"]})
        check_fetched(fleet["old"]("fetch", name=f"a-{hub}", fallback=str(model)), wanted, None)
        fleet["new"]("join", name=f"b-{hub}", model=hub, connection={"hub": at["new"]})
        check_fetched(fleet["new"]("fetch", name=f"b-{hub}"), wanted, holder)


@pytest.mark.parametrize("first", NAMES)
def test_process_of_different_release_takes_over_hub(fleet: Fleet, model: Path, wanted: str, first: str) -> None:
    def hosts(driver: Driver) -> bool:
        """Return whether a driver's process hosts the hub. The file that it locks has its process id."""
        return (fleet.directory / "hub-0.lock").read_text() == f"{driver.pid}\n"

    hosting, next_one = fleet[first], fleet[other(first)]
    holder = hosting("join", name="a", model="m", connection={})
    check_fetched(hosting("fetch", name="a", fallback=str(model)), wanted, None)
    reader = next_one("join", name="b", model="m", connection={})
    check_fetched(next_one("fetch", name="b"), wanted, holder)
    assert hosts(hosting)
    hosting("close", name="a")
    wait_until(lambda: hosts(next_one))
    hosting("join", name="a", model="m", connection={})
    check_fetched(hosting("fetch", name="a"), wanted, reader)


@pytest.mark.parametrize("first", NAMES)
def test_engine_attaches_cache_of_different_release(fleet: Fleet, model: Path, wanted: str, first: str) -> None:
    # The command has another name in the previous release.
    command = {"old": "keep", "new": "cache"}
    words = [str(model), "--model", "m", "--drain-s", "60"]
    keeper = fleet.start(first, command[first], *words, until="keeping")
    engines = list(fleet.drivers.values())
    for engine in engines:
        attached = engine("attach", name="a", model="m")
        assert attached["digests"] == wanted and attached["verified"]
    before = set(fleet[first]("status", model="m"))

    successor = fleet.start(other(first), command[other(first)], *words, until="keeping")
    # The whole model is read from the first cache's memory, and nothing from storage.
    (paths,) = [line for line in successor.said if line.startswith("paths: ")]
    assert re.match(rf"paths: [\d.]+ [MG]B by shm <- {min(before)[:8]}", paths), paths
    (member,) = set(fleet[first]("status", model="m")) - before
    keeper.send_signal(signal.SIGTERM)
    for engine in engines:
        wait_until(lambda engine=engine: engine("standing", name="a") == "draining")
        attached = engine("attach", name="b", model="m")
        assert attached["digests"] == wanted and attached["path"] == f"shm, mapped: {member[:8]}"
        engine("close", name="a")
    assert keeper.wait() == 0
    for engine in engines:
        engine("check", name="b")
        assert engine("standing", name="b") == "kept"
