"""The fleet page in a real browser: processes fetch, sync, convert, fail and are killed, and an operator drains one.

`FLEET_PAGE_SHOTS=docs/assets` writes the screenshots of the documents.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("starlette")
pytest.importorskip("selenium", reason="selenium is not installed")

if not shutil.which("chromium") or not shutil.which("chromedriver"):
    pytest.skip("chromium and chromedriver are not installed", allow_module_level=True)

import msgspec
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from tests.support import commands
from tests.support.fleet import Task, Worker
from tests.support.fork_server import ForkServer
from tests.support.sync import SyncTask, SyncWorker

import penstock as ps
from penstock.hub.messages import Beat, Hello, HoldingState, Identity, UpstreamsRequest
from penstock.testing.checkpoints import write_llama
from penstock_hub.auth import Auth
from penstock_hub.directory import Directory
from penstock_hub.server import HubThread, bind
from penstock_hub.store import MemoryStore

pytestmark = pytest.mark.slow
TOKEN, OPERATOR = "the-token-of-this-fleet", "the-operator-of-this-fleet"
CHUNKS = {"penstock.holding.weight_layout.CHUNK_BYTES": 1 << 20}
Shot = Callable[..., None]


@pytest.fixture
def directory() -> Directory:
    return Directory(MemoryStore(), fresh=True)


@pytest.fixture
def hub(directory: Directory, tmp_path: Path) -> Iterator[HubThread]:
    (tmp_path / "tokens").write_text(f"{TOKEN}\n{OPERATOR} @operator\n")
    auth = Auth.of(token_file=tmp_path / "tokens")
    thread = HubThread(directory, bind("127.0.0.1:0", auth), auth)
    thread.start()
    yield thread
    thread.stop()


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1400"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    driver = webdriver.Chrome(service=webdriver.ChromeService(shutil.which("chromedriver")), options=options)
    scheme(driver, "light")
    yield driver
    driver.quit()


def scheme(browser: webdriver.Chrome, value: str) -> None:
    """Make the page see a user who prefers light or dark colours, and no motion, so that pictures are still."""
    features = [{"name": "prefers-color-scheme", "value": value}, {"name": "prefers-reduced-motion", "value": "reduce"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


@pytest.fixture
def shot(browser: webdriver.Chrome) -> Shot:
    """Write a screenshot of the page, if the environment names a directory for them."""

    def take(name: str, part: WebElement | None = None) -> None:
        if place := os.environ.get("FLEET_PAGE_SHOTS"):
            path = f"{place}/{name}.png"
            browser.execute_script("scrollTo(0, 0)")
            browser.save_screenshot(path) if part is None else part.screenshot(path)

    return take


@pytest.fixture
def models() -> Iterator[Path]:
    """A directory with a name that may stand in a screenshot."""
    with tempfile.TemporaryDirectory(prefix="models-", dir="/var/tmp") as directory:
        yield Path(directory)


def wait_until(reached: Callable[[], bool], what: str, *, timeout_s: float = 60.0) -> None:
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


def card(browser: webdriver.Chrome, job: str) -> dict[str, str]:
    """Return the page's facts about a conversion by their names. `phase` is the first pill."""
    script = """
      const card = document.querySelector(`[data-job="${arguments[0]}"]`);
      if (!card) return {};
      const facts = [...card.querySelectorAll(".facts div")].map(d => [...d.children].map(c => c.textContent));
      return Object.fromEntries([["phase", card.querySelector(".pill").textContent], ...facts]);
    """
    return browser.execute_script(script, job)


def versions(browser: webdriver.Chrome) -> list[str]:
    script = "return [...document.querySelectorAll('#syncs tbody tr')].map(r => r.cells[3].textContent)"
    return browser.execute_script(script)


def text(browser: webdriver.Chrome, name: str) -> str:
    return browser.execute_script("return document.getElementById(arguments[0]).textContent", name)


def log_in(browser: webdriver.Chrome, hub: HubThread, token: str = TOKEN) -> None:
    """Open the page as a person does. It asks for the token."""
    browser.get("about:blank")
    browser.get_log("performance")  # requests of the browser's own start
    browser.get(hub.url)
    wait_until(lambda: browser.find_element(By.ID, "login").is_displayed(), "the page asks for a token")
    browser.find_element(By.ID, "token").send_keys(token, Keys.ENTER)
    wait_until(lambda: text(browser, "state") == "Live", "the page is live")


def log_out(browser: webdriver.Chrome) -> None:
    browser.execute_script("sessionStorage.clear()")


def violations(browser: webdriver.Chrome) -> list[str]:
    """Return the rules of axe that the page breaks."""
    package = pytest.importorskip("axe_playwright_python", reason="axe is not installed")
    browser.execute_script((files(package) / "axe.min.js").read_text(encoding="utf-8"))
    found = browser.execute_async_script("axe.run().then(r => arguments[0](r.violations))")
    return [f"{rule['id']}: {rule['nodes'][0]['html'][:120]}" for rule in found]


def resize(browser: webdriver.Chrome, width: int, height: int) -> None:
    """Set the size of the page, which may be smaller than the smallest window."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def whole(browser: webdriver.Chrome) -> None:
    """Make the window as high as the page, for a screenshot of all of it."""
    resize(browser, 1280, browser.execute_script("return document.documentElement.scrollHeight"))


def test_fleet_page_shows_fleet_state(
    hub: HubThread, browser: webdriver.Chrome, shot: Shot, tmp_path: Path, models: Path, fork_server: ForkServer
) -> None:
    write_llama(models / "llama", total_bytes=24 << 20, shards=2)
    settings = {"token": TOKEN}
    connection = ps.ConnectionSettings(hub=hub.url, token=TOKEN)

    def status() -> dict[str, Any]:
        """Return what `penstock status --format json` prints."""
        return msgspec.to_builtins(ps.hub.status(connection=connection))

    log_in(browser, hub)
    wait_until(lambda: tiles(browser).get("Members") == "0", "nobody is there yet")
    with ExitStack() as stack:

        def start(**task: Any) -> Worker:
            whole = Task(**{"model": "llama", "hub": hub.url, "connection": settings, "constants": CHUNKS, **task})
            return stack.enter_context(Worker(whole, fork_server))

        def rank(side: str, **task: Any) -> SyncWorker:
            whole = SyncTask(side=side, hub=hub.url, connection=settings, rows=512, columns=512, **task)
            return stack.enter_context(SyncWorker(whole, fork_server))

        first = start(fallback=str(models / "llama"))
        trainer, engine = rank("publisher", mode="snapshot"), rank("subscriber")
        first.wait_for("fetched")
        second = start()
        second.wait_for("fetched")
        for line in ("publish 7", "publish 8"):
            trainer.send(line)
            assert "error" not in trainer.result(line)
            if line == "publish 7":
                engine.send("update 7")
                assert "error" not in engine.result("update 7")

        # A conversion runs, and two members fetch together from slow storage.
        waits = '{"op": "function", "function": "tests.support.jobs:waits"}'
        words = [
            "convert",
            str(models / "llama"),
            str(models / "llama-converted"),
            "--op",
            waits,
            "--devices",
            "cpu",
        ]
        words += ["--workers", "2", "--task-bytes", "1M", "--hub", hub.url, "--token-file", str(tmp_path / "tokens")]
        conversion = stack.enter_context(commands.start(fork_server, words))
        wait_until(lambda: bool(status()["jobs"]), "the conversion is announced")
        job = status()["jobs"][0]["job"]
        wait_until(
            lambda: not card(browser, job).get("Tasks", "0 of").startswith("0 of"), "the page shows its progress"
        )
        slow = {"model": "qwen", "fallback": str(models / "llama"), "storage_pause_s": 0.4}
        start(**slow)
        fourth = start(**slow)
        wait_until(lambda: tiles(browser)["Members"] == "6", "every member is counted")
        wait_until(lambda: any(row[3].startswith("filling") and row[7] for row in rows(browser)), "a transfer runs")
        wait_until(lambda: bool(browser.find_elements(By.CSS_SELECTOR, "#relay .edge.runs")), "and is in the picture")
        wait_until(lambda: versions(browser) == ["8", "7, 1 behind"], "the straggler is marked")
        whole(browser)
        shot("fleet-page")
        shown, said = card(browser, job), status()["jobs"][0]["state"]
        assert shown["Tasks"].endswith(f"of {said['num_tasks']}") and shown["Workers"].startswith("2")
        assert violations(browser) == []
        scheme(browser, "dark")
        assert violations(browser) == []
        shot("fleet-page-dark")
        scheme(browser, "light")

        # The page shows the same values for each member as `status`.
        wait_until(lambda: tiles(browser)["Filling"] == "0", "all of them are whole")
        now = status()
        expected = sorted(
            (
                f"{member['member'][:8]} {member['name']}",
                held["identity"]["model"],
                f"{held['state']} 100 %",
                held["why"],
            )
            for member in now["members"]
            for held in member["holdings"]
        )
        assert sorted((row[0], row[2], row[3], row[9]) for row in rows(browser) if row[5]) == expected
        paths = {row[8] for row in rows(browser)}
        assert any(path.startswith("100 % storage from ") for path in paths)
        assert any(
            path.startswith("100 % ") and f"from {now['members'][0]['member'][:2]}"[:5] in path for path in paths
        )
        assert tiles(browser)["Reads saved"] != "0 B"
        ranks = {(s["side"], s["version"]) for member in now["members"] for s in member["syncs"]}
        assert ranks == {("publisher", 8), ("subscriber", 7)}
        # Show by keyboard why a member uses its path.
        node = browser.find_element(By.CSS_SELECTOR, f'#relay [data-member="{second.events["joined"]["member"]}"]')
        node.send_keys(Keys.ENTER)
        why = next(m for m in now["members"] if m["member"] == second.events["joined"]["member"])["holdings"][0]["why"]
        assert why and why in text(browser, "relay-detail")

        # After a member is killed, it is first silent and then gone.
        killed = fourth.wait_for("fetched") and fourth.events["joined"]["member"]
        fourth.kill()
        wait_until(lambda: "has sent no heartbeat" in text(browser, "problems"), "the page says that it is silent")
        wait_until(lambda: killed not in {member["member"] for member in status()["members"]}, "the hub forgets it")
        wait_until(lambda: not any(row[0].startswith(killed[:8]) for row in rows(browser)), "the page does, too")
        assert tiles(browser)["Members"] == str(len(status()["members"])) == "5"

        # A member fails and leaves. Its error stays, with the blame and the next step.
        with Worker(Task(model="nobody-has-it", hub=hub.url, connection=settings, wait_s=0.1), fork_server) as lost:
            lost.wait_for("failed")
            assert lost.leave() == 3
        wait_until(lambda: bool(status()["failures"]), "the hub has the error")
        failure = status()["failures"][0]
        wait_until(lambda: failure["message"] in text(browser, "problems"), "the page shows it")
        assert f"blame: {failure['blame']}" in text(browser, "problems") and failure["hint"] in text(
            browser, "problems"
        )

        assert conversion.wait(120) == 0
        said = status()["jobs"][0]["state"]
        assert (said["phase"], said["num_done"]) == ("done", said["num_tasks"])
        wait_until(lambda: card(browser, job).get("phase") == "done", "the conversion has ended on the page")
        shown = card(browser, job)
        assert shown["Tasks"] == f"{said['num_tasks']} of {said['num_tasks']}"
        assert (shown["Reassigned"], shown["Duplicated"]) == (str(said["num_reassigned"]), str(said["num_duplicated"]))
        for worker in (first, second):
            worker.leave()
    wait_until(lambda: tiles(browser)["Members"] == str(len(status()["members"])), "those that left are gone")
    severe = [entry["message"] for entry in browser.get_log("browser") if "401" not in entry["message"]]
    assert severe == []
    # No request went to another origin.
    requests = [
        entry["message"] for entry in browser.get_log("performance") if 'Network.requestWillBeSent"' in entry["message"]
    ]
    assert requests and all(hub.url in message or "data:" in message for message in requests)


def label(member: dict[str, Any]) -> str:
    """Return the name of a member as the page has it."""
    return f"{member['member'][:8]} {member['name']}"


def announce(directory: Directory, number: int) -> str:
    """Register a member that holds or fills a model, without a separate process. Return its id."""
    name = member_id(number)
    directory.hello(
        Hello(
            member=name,
            host=f"host-{number // 8:03d}",
            doors=("http://127.0.0.1:1",),
            name=f"gpu-{number // 8:03d}:{number}",
        )
    )
    is_whole = number % 3 == 0
    identity = Identity(model=("llama-70b", "qwen-32b", "mixtral-8x22b", "glm-air")[number // 3 % 4])
    holding = HoldingState(
        key=identity.key(),
        identity=identity,
        num_chunks=100,
        nbytes=140_000_000_000,
        have=((0, 100 if is_whole else 1 + number % 99),),
        state="whole" if is_whole else "filling",
        max_readers=4,
        device="cuda:0",
        revision="w1-5b1c9e02aa47" if is_whole else "",
        path="100% storage s3://models/" if is_whole else f"100% cuda_ipc <- {member_id(number - number % 3)[:8]}",
        why="storage: no member had these chunks" if is_whole else "cuda_ipc: the nearest there is",
        gb_per_s=0.0 if is_whole else 12.5 + number % 7,
    )
    directory.beat(name, Beat(holdings=(holding,)))
    return name


def member_id(number: int) -> str:
    return f"{number * 0x9E3779B1 % (1 << 32):08x}{number:024x}"


def test_operator_drains_member_from_fleet_page(
    directory: Directory, hub: HubThread, browser: webdriver.Chrome
) -> None:
    names = [announce(directory, number) for number in (0, 12, 24)]  # three holders of one model
    reader = announce(directory, 1)
    connection = ps.ConnectionSettings(hub=hub.url, token=TOKEN)

    def drain() -> tuple[str, str] | None:
        found = {member.member: member.drain for member in ps.hub.status(connection=connection).members}[names[0]]
        return None if found is None else (found.by[:6], found.reason)

    def sources() -> set[str]:
        state = next(m for m in directory.status().members if m.member == reader).holdings[0]
        return {
            upstream.member
            for upstream in directory.upstreams(UpstreamsRequest(member=reader, holding=state)).upstreams
        }

    def buttons() -> list[str]:
        script = "return [...document.querySelectorAll('[data-drain]')].map(b => b.getAttribute('aria-label'))"
        return browser.execute_script(script)

    # Without the right there is no button, and the hub refuses the request itself.
    log_in(browser, hub)
    wait_until(lambda: len(rows(browser)) == 4, "the members are there")
    assert buttons() == [] and not browser.find_element(By.ID, "operator").is_displayed()
    script = """
      const [id, token, done] = arguments;
      const headers = { Authorization: `Bearer ${token}` };
      fetch(`v1/drains/${id}`, { method: "PUT", body: "{}", headers }).then(answer => done(answer.status));
    """
    assert browser.execute_async_script(script, names[0], TOKEN) == 403
    log_out(browser)
    log_in(browser, hub, OPERATOR)
    wait_until(lambda: len(buttons()) == 4, "an operator has a button for each member")
    assert browser.find_element(By.ID, "operator").is_displayed()
    for name in names:
        beat_again(directory, name)
    assert names[0] in sources()
    button = browser.find_element(By.CSS_SELECTOR, f'[data-drain="{names[0]}"]')
    button.click()
    browser.find_element(By.ID, "drain-reason").send_keys("a new driver")
    assert violations(browser) == []
    browser.find_element(By.CSS_SELECTOR, "#drain .quiet").click()
    assert drain() is None, "cancelled"
    browser.find_element(By.CSS_SELECTOR, f'[data-drain="{names[0]}"]').click()
    browser.find_element(By.ID, "drain-reason").send_keys("a new driver", Keys.ENTER)
    wait_until(lambda: drain() == ("token:", "a new driver"), "the hub has the order")
    wait_until(lambda: any(row[3] == "draining 100 %" for row in rows(browser)), "the page shows it")
    wait_until(lambda: "is draining: a new driver" in text(browser, "problems"), "and the reason")
    assert f"Undo the drain of {names[0][:8]} gpu-000:0" in buttons()
    for name in (*names, reader):
        beat_again(directory, name)
    assert sources() and names[0] not in sources()
    browser.find_element(By.CSS_SELECTOR, f'[data-drain="{names[0]}"]').click()
    wait_until(lambda: drain() is None, "the order is undone")
    wait_until(lambda: not any(row[3].startswith("draining") for row in rows(browser)), "the page shows that, too")


def beat_again(directory: Directory, name: str) -> None:
    """Send the heartbeat of an announced member, which would otherwise be forgotten."""
    announce(directory, int(name[8:], 16))


def test_fleet_page_shows_a_thousand_members(
    directory: Directory, hub: HubThread, browser: webdriver.Chrome, shot: Shot
) -> None:
    for number in range(1000):
        announce(directory, number)
    begun = time.monotonic()
    log_in(browser, hub)
    wait_until(lambda: tiles(browser).get("Members") == "1000", "all members are there")
    print(f"1,000 members shown after {time.monotonic() - begun:.2f} s")
    shot("fleet-page-1000")
    assert len(rows(browser)) == 100
    browser.find_element(By.TAG_NAME, "body").send_keys("/")
    browser.switch_to.active_element.send_keys("gpu-077:")
    wait_until(lambda: len(rows(browser)) == 8, "the search by keyboard finds the members of a host")
    resize(browser, 390, 900)
    width = browser.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert width <= 0, f"the page is {width} pixels wider than a phone"
    shot("fleet-page-phone")
    browser.switch_to.active_element.send_keys(Keys.ESCAPE)
    resize(browser, 1280, 1400)
    wait_until(lambda: len(rows(browser)) == 100, "the search is empty again")
    browser.find_element(By.ID, "all").click()
    assert len(rows(browser)) == 1000
