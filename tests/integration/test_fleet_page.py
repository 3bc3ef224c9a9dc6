"""The fleet page in a real browser, over a hub with a token and members that fetch, keep, publish and leave.

`FLEET_PAGE_SHOTS=DIR` writes screenshots there; those of the documents are made so.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("selenium", reason="selenium is not installed")

if not shutil.which("chromium") or not shutil.which("chromedriver"):
    pytest.skip("chromium and chromedriver are not installed", allow_module_level=True)

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

import penstock as ps
from penstock.hub.auth import Auth
from penstock.hub.client import HubClient
from penstock.hub.directory import Directory
from penstock.hub.messages import Beat, Hello, HoldingState, Identity
from penstock.hub.server import HubThread, bind
from penstock.hub.store import MemoryStore
from penstock.phases import BootRecord
from penstock.testing.checkpoints import write_llama

pytestmark = pytest.mark.slow
TOKEN = "the-token-of-this-fleet"
Shot = Callable[..., None]


@pytest.fixture
def directory() -> Directory:
    return Directory(MemoryStore())


@pytest.fixture
def hub(directory: Directory, tmp_path: Path) -> Iterator[HubThread]:
    (tmp_path / "tokens").write_text(f"{TOKEN}\n")
    auth = Auth.of(token_file=tmp_path / "tokens")
    thread = HubThread(directory, bind("127.0.0.1:0", auth), auth)
    thread.start()
    yield thread
    thread.stop()


@pytest.fixture(params=["light", "dark"])
def browser(request, tmp_path: Path) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1400"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    driver = webdriver.Chrome(service=webdriver.ChromeService(shutil.which("chromedriver")), options=options)
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": request.param}]}
    )
    yield driver
    driver.quit()


@pytest.fixture
def shot(browser: webdriver.Chrome, request) -> Shot:
    """Write a screenshot, if the environment names a directory for them."""

    def take(name: str, part: WebElement | None = None) -> None:
        if place := os.environ.get("FLEET_PAGE_SHOTS"):
            path = f"{place}/{name}-{request.node.callspec.params['browser']}.png"
            browser.save_screenshot(path) if part is None else part.screenshot(path)

    return take


def until(reached: Callable[[], bool], what: str, *, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


def tiles(browser: webdriver.Chrome) -> dict[str, str]:
    script = "return [...document.querySelectorAll('#tiles div')].map(d => [...d.children].map(c => c.textContent))"
    return dict(browser.execute_script(script))


def rows(browser: webdriver.Chrome) -> list[list[str]]:
    script = "return [...document.querySelectorAll('#members tbody tr')].map(r => [...r.cells].map(c => c.textContent))"
    return browser.execute_script(script)


def versions(browser: webdriver.Chrome) -> list[str]:
    script = "return [...document.querySelectorAll('#syncs tbody tr')].map(r => r.cells[3].textContent)"
    return browser.execute_script(script)


def text(browser: webdriver.Chrome, name: str) -> str:
    return browser.execute_script("return document.getElementById(arguments[0]).textContent", name)


def log_in(browser: webdriver.Chrome, hub: HubThread) -> None:
    """Open the page as a person does: it asks for the token."""
    browser.get("about:blank")
    browser.get_log("performance")  # what the browser itself asked for as it started
    browser.get(hub.url)
    until(lambda: browser.find_element(By.ID, "login").is_displayed(), "the page asks for a token")
    browser.find_element(By.ID, "token").send_keys(TOKEN, Keys.ENTER)
    until(lambda: text(browser, "state") == "Live", "the page is live")


def violations(browser: webdriver.Chrome) -> list[str]:
    """Return the rules of axe that the page breaks."""
    package = pytest.importorskip("axe_playwright_python", reason="axe is not installed")
    browser.execute_script((files(package) / "axe.min.js").read_text(encoding="utf-8"))
    found = browser.execute_async_script("axe.run().then(r => arguments[0](r.violations))")
    return [f"{rule['id']}: {rule['nodes'][0]['html'][:120]}" for rule in found]


def test_a_fleet_is_shown_as_it_is(hub: HubThread, browser: webdriver.Chrome, shot: Shot, tmp_path: Path) -> None:
    write_llama(tmp_path / "llama", total_bytes=8 << 20, shards=2)
    connection = ps.ConnectionSettings(hub=hub.url, token=TOKEN)
    log_in(browser, hub)
    until(lambda: tiles(browser).get("Members") == "0", "nobody is there yet")
    held: dict = {}
    with ps.join("llama", connection=connection) as first, ps.join("llama", connection=connection) as second:
        first.fetch(held, fallback=tmp_path / "llama")
        second.fetch({}, fallback=tmp_path / "llama")
        with (
            ps.publisher("policy", held, mode="snapshot", connection=connection) as publisher,
            ps.subscriber("policy", {name: t.clone() for name, t in held.items()}, connection=connection) as subscriber,
        ):
            publisher.publish(version=7)
            subscriber.update()
            status = ps.status(connection=connection)
            until(lambda: tiles(browser)["Members"] == str(len(status.members)), "every member is counted")
            until(lambda: "version 7" in text(browser, "syncs"), "the version is shown")
            until(lambda: versions(browser) == ["7", "7"], "both sides have it")
            expected = sorted(
                (f"{member.member[:8]} {member.name}", holding.identity.model)
                for member in status.members
                for holding in member.holdings
            )
            assert sorted((row[0], row[2]) for row in rows(browser) if row[3].startswith("whole")) == expected
            path = next(row[7] for row in rows(browser) if "from" in row[7] and "storage" not in row[7])
            assert path.startswith("100 % ")
            assert "llama" in text(browser, "models") and "100 %" in text(browser, "models")
            assert browser.find_elements(By.CSS_SELECTOR, "#relay .edge")
            assert tiles(browser)["Not read from storage"] != "0 B"
            assert violations(browser) == []
            shot("fleet")
    until(lambda: tiles(browser)["Members"] == "0", "members that left are gone")
    assert rows(browser) == []
    severe = [entry["message"] for entry in browser.get_log("browser") if "401" not in entry["message"]]
    assert severe == []
    # Nothing was asked of another origin.
    requests = [
        entry["message"] for entry in browser.get_log("performance") if 'Network.requestWillBeSent"' in entry["message"]
    ]
    assert requests and all(hub.url in message or "data:" in message for message in requests)


def waterfalls(browser: webdriver.Chrome) -> list[tuple[str, list[list[str]]]]:
    """Return the title of each start, and the rows of its chart: phase, begin, length, bytes."""
    script = """return [...document.querySelectorAll('#boots details')].map(d => [
        d.querySelector('summary').textContent,
        [...d.querySelectorAll('tbody tr')].map(r => [0, 2, 3, 4].map(i => r.cells[i].textContent))])"""
    return [(title, lines) for title, lines in browser.execute_script(script)]


FAILS = "import penstock as ps\nwith ps.join('no-such-model') as fleet:\n    fleet.fetch({}, wait_s=0.0)\n"


def test_starts_are_shown_as_waterfalls(
    hub: HubThread, browser: webdriver.Chrome, shot: Shot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.phases._record", BootRecord())
    write_llama(tmp_path / "llama", total_bytes=8 << 20, shards=2)
    connection = ps.ConnectionSettings(hub=hub.url, token=TOKEN)
    log_in(browser, hub)
    until(lambda: "No process" in text(browser, "boots-note"), "nobody has loaded anything")
    with ps.join("llama", connection=connection) as fleet:
        with ps.phase("start"):
            fleet.fetch({}, fallback=tmp_path / "llama")
            with ps.phase("warm up"):
                until(lambda: any("starting, warm up" in title for title, _ in waterfalls(browser)), "it warms up")
                # It runs, and the chart with it.
                before = waterfalls(browser)[0]
                until(lambda: waterfalls(browser)[0] != before, "the chart grows while nothing else changes")
        until(lambda: any("ready after" in title for title, _ in waterfalls(browser)), "it is ready")
        environ = {**os.environ, "PENSTOCK_HUB": hub.url, "PENSTOCK_TOKEN_FILE": str(tmp_path / "tokens")}
        assert subprocess.run([sys.executable, "-c", FAILS], env=environ, capture_output=True).returncode == 1
        until(lambda: len(waterfalls(browser)) == 2, "the process that failed is there, although it has left")
        with HubClient.connect(hub.url, TOKEN) as client:
            reply = client.phases()
        assert (reply.ready, reply.starting, reply.failed) == (1, 0, 1)
        assert text(browser, "boots-note").startswith("0 starting, 1 ready, 1 failed.")
        # The one that failed first, as what needs a look.
        for replica, (title, lines) in zip(reversed(reply.replicas), waterfalls(browser), strict=True):
            assert title.startswith(f"{replica.member[:8]} {replica.name}")
            names = [line[0].partition(" (")[0] for line in lines]
            assert names == [phase.name for phase in replica.phases]
            for line, phase in zip(lines, replica.phases, strict=True):
                assert (phase.state == "done") == ("(" not in line[0])
                length = f"{int(phase.seconds * 1000 + 0.5)} ms" if phase.seconds < 1 else f"{phase.seconds:.1f} s"
                assert line[2] == length
                assert line[3] == (f"{phase.nbytes / 1e6:.1f} MB" if phase.nbytes else "")
        failed = reply.replicas[-1]
        assert failed.error is not None and failed.has_left
        fault = browser.find_element(By.CSS_SELECTOR, "#boots .fault").text
        assert failed.error.error in fault and "blame: source" in fault and (failed.error.hint or "") in fault
        assert violations(browser) == []
        shot("starts", browser.find_element(By.CSS_SELECTOR, "section:has(#boots)"))
        # By keyboard: Enter folds a chart, and the focus stays.
        summary = browser.find_element(By.CSS_SELECTOR, "#boots summary")
        summary.send_keys(Keys.ENTER)
        until(lambda: not waterfalls(browser)[0][1], "the chart is folded")
        assert browser.switch_to.active_element == summary
        summary.send_keys(Keys.ENTER)
        until(lambda: bool(waterfalls(browser)[0][1]), "and unfolded")
        browser.find_element(By.ID, "search").send_keys("no-such-model")
        until(lambda: [title for title, _ in waterfalls(browser) if "llama" in title] == [], "the search finds starts")
    severe = [entry["message"] for entry in browser.get_log("browser") if "401" not in entry["message"]]
    assert severe == []


def announce(directory: Directory, number: int, *, silent: bool = False) -> None:
    """Register a member that holds a model, without a process of its own."""
    name = f"{number:032x}"
    directory.hello(
        Hello(member=name, host=f"host-{number // 8:03d}", doors=("http://127.0.0.1:1",), name=f"worker:{number}")
    )
    is_whole = number % 3 == 0
    identity = Identity(model=f"model-{number % 4}")
    holding = HoldingState(
        key=identity.key(),
        identity=identity,
        num_chunks=100,
        nbytes=16_000_000_000,
        have=((0, 100 if is_whole else 1 + number % 99),),
        state="whole" if is_whole else "filling",
        max_readers=4,
        device="cuda:0",
        path=f"100% cuda_ipc <- {number - number % 3:032x}"[:60] if not is_whole else "100% storage s3://bucket/model/",
        gb_per_s=0.0 if is_whole else 12.5,
    )
    directory.beat(name, Beat(holdings=(holding,)))


@pytest.mark.parametrize("browser", ["light"], indirect=True)
def test_a_thousand_members_are_usable(
    directory: Directory, hub: HubThread, browser: webdriver.Chrome, shot: Shot
) -> None:
    for number in range(1000):
        announce(directory, number)
    begun = time.monotonic()
    log_in(browser, hub)
    until(lambda: tiles(browser).get("Members") == "1000", "all members are there")
    print(f"1,000 members shown after {time.monotonic() - begun:.2f} s")
    assert len(rows(browser)) == 1000
    shot("thousand")
    browser.find_element(By.TAG_NAME, "body").send_keys("/")
    browser.switch_to.active_element.send_keys("worker:77")
    until(lambda: len(rows(browser)) == 11, "the search by keyboard finds 77 and 770 to 779")
    browser.set_window_size(390, 900)
    width = browser.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert width <= 0, f"the page is {width} pixels wider than a phone"
    shot("phone")
