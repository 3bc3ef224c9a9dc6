"""A real Prometheus scrapes a fleet of real processes and evaluates every expression in `deploy/`.

The fleet has a hub, a cache, two members that fetch, a publisher and a subscriber, each in its own process.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("starlette")
pytest.importorskip("yaml")

if not shutil.which("prometheus") or not shutil.which("promtool"):
    pytest.skip("prometheus is not installed: scripts/setup_prometheus.sh", allow_module_level=True)

import yaml
from tests.support import commands
from tests.support.fleet import Task, Worker
from tests.support.fork_server import ForkServer
from tests.support.keeper import KeeperProcess
from tests.support.ports import free_ports
from tests.support.sync import SyncTask, SyncWorker

from penstock.telemetry.metrics import METRICS
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
RULES = DEPLOY / "prometheus" / "penstock.rules.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "penstock.json").read_text(encoding="utf-8"))
RANGE = "20s"
"""Range that replaces those of Grafana and the rules, because the fleet in this test lives only that long."""
INTERVAL = "500ms"
SELECTOR = re.compile(r"(?:penstock_\w+|\bup\b)(?:\{[^}]*\})?")


def expressions() -> list[str]:
    """Return every expression of the dashboard, as Grafana would send it."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    assert len(found) > 30
    return [re.sub(r"\[(\$__rate_interval|\d+[hm])\]", f"[{RANGE}]", expression) for expression in found]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


@dataclass(slots=True)
class Fleet:
    """The processes, and the Prometheus that reads them."""

    url: str
    hub: str
    instances: dict[str, str] = field(default_factory=dict)
    """The Prometheus `instance` of each process."""
    members: dict[str, Worker] = field(default_factory=dict)

    def api(self, path: str, **parameters: str) -> Any:
        """Return the response of Prometheus' API."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression now."""
        result: list[dict[str, Any]] = self.api("query", query=expression)["result"]
        return result

    def alerts(self) -> dict[str, dict[str, Any]]:
        """Return the state of each rule by its name."""
        return {rule["name"]: rule for group in self.api("rules")["groups"] for rule in group["rules"]}

    def firing(self) -> dict[str, set[str]]:
        """Return the instances for which each alert fires."""
        return {
            name: {alert["labels"].get("instance", "") for alert in rule["alerts"] if alert["state"] == "firing"}
            for name, rule in self.alerts().items()
            if any(alert["state"] == "firing" for alert in rule["alerts"])
        }


def wait_until(reached: Callable[[], object], what: str, *, timeout_s: float = 30.0) -> None:
    """Poll until the condition holds, because Prometheus scrapes and evaluates by its own clock."""
    deadline = time.monotonic() + timeout_s
    while not (now := reached()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}: {now}"
        time.sleep(0.1)


def configuration(directory: Path, hub_port: int, ports: list[int]) -> Path:
    """Write the shipped configuration and rules with the targets, tokens and intervals of this test."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL}
    hub, processes = config["scrape_configs"]
    del hub["tls_config"]
    hub["scheme"] = "http"
    hub["authorization"]["credentials_file"] = str(directory / "hub.token")
    hub["static_configs"] = [{"targets": [f"127.0.0.1:{hub_port}"]}]
    processes["authorization"]["credentials_file"] = str(directory / "metrics.token")
    processes["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    # Leave out the waiting times, because the test checks only that an expression sees its condition.
    text = re.sub(r"^ +for: .*\n", "", RULES.read_text(encoding="utf-8"), flags=re.M)
    (directory / RULES.name).write_text(text)
    return directory / "prometheus.yml"


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    # Use a short directory, because the path of a Unix socket is limited.
    with tempfile.TemporaryDirectory(prefix="ps-") as name, ExitStack() as stack:
        directory = Path(name)
        (directory / "hub.token").write_text(secrets.token_hex(16))
        (directory / "metrics.token").write_text(secrets.token_hex(16))
        prometheus_port, hub_port, *ports = free_ports(7)
        fleet = Fleet(url=f"http://127.0.0.1:{prometheus_port}", hub=f"127.0.0.1:{hub_port}")
        log = stack.enter_context(open(directory / "prometheus.log", "wb"))
        command = ["prometheus", f"--config.file={configuration(directory, hub_port, ports)}"]
        command += [f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address=127.0.0.1:{prometheus_port}"]
        prometheus = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(prometheus.wait)
        stack.callback(prometheus.kill)
        (directory / "run").mkdir(mode=0o700)
        environ = {
            "PENSTOCK_RUNTIME_DIR": str(directory / "run"),
            "PENSTOCK_HUB": f"http://{fleet.hub}",
            "PENSTOCK_TOKEN_FILE": str(directory / "hub.token"),
            "PENSTOCK_METRICS_TOKEN_FILE": str(directory / "metrics.token"),
        }
        write_llama(directory / "llama", total_bytes=4 * MIB, shards=2)
        fork_server = stack.enter_context(ForkServer())
        listen = ["hub", "--listen", fleet.hub, "--token-file", str(directory / "hub.token")]
        stack.enter_context(commands.start(fork_server, listen, {"PENSTOCK_RUNTIME_DIR": str(directory / "run")}))
        wait_until(lambda: answers(f"http://{fleet.hub}/healthz"), "the hub answers")

        def environ_of(process: str) -> dict[str, str]:
            """Return the environment of a process, with the next port for its metrics."""
            fleet.instances[process] = address = f"127.0.0.1:{ports[len(fleet.instances)]}"
            return environ | {"PENSTOCK_METRICS": address}

        keep = [str(directory / "llama"), "--model", "llama", "--memory-bytes", "64M"]
        stack.enter_context(KeeperProcess(keep, environ=environ_of("keeper"), fork_server=fork_server))
        for process, model in (("first", "llama"), ("second", "llama")):
            task = Task(model=model, fallback=str(directory / "llama"), environ=environ_of(process))
            fleet.members[process] = stack.enter_context(Worker(task, fork_server))
        publisher = SyncTask(side="publisher", environ=environ_of("publisher"), options={"arena": True})
        subscriber = SyncTask(side="subscriber", environ=environ_of("subscriber"))
        for task in (publisher, subscriber):
            fleet.members[task.side] = stack.enter_context(SyncWorker(task, fork_server))
        for process in ("first", "second"):
            fleet.members[process].wait_for("fetched")
        wait_until(lambda: answers(f"{fleet.url}/-/ready"), "Prometheus is ready")
        everybody = {*fleet.instances.values(), fleet.hub}
        wait_until(lambda: {one["metric"]["instance"] for one in fleet.query("up == 1")} == everybody, "all are read")
        yield fleet


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def sync(fleet: Fleet, version: int) -> None:
    """Publish a version and have it received."""
    publisher, subscriber = fleet.members["publisher"], fleet.members["subscriber"]
    assert isinstance(publisher, SyncWorker)
    assert isinstance(subscriber, SyncWorker)
    publisher.call("subscribers 1")
    publisher.send(f"publish {version}")
    subscriber.call(f"wait {version}")
    assert "error" not in subscriber.call(f"update {version}")
    assert len(publisher.result(f"publish {version}")["committed"]) == 1


def test_prometheus_rules_and_configuration_are_valid(tmp_path: Path) -> None:
    path = configuration(tmp_path, 7070, [9464])
    for command in (["check", "rules", str(RULES)], ["check", "config", "--syntax-only", str(path)]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, check=False, timeout=30)
        assert done.returncode == 0, done.stdout + done.stderr


def check_numbers(fleet: Fleet) -> None:
    """Check that Prometheus has the numbers of this fleet, and all metrics of the table."""

    def value(expression: str) -> float:
        return sum(float(series["value"][1]) for series in fleet.query(expression))

    nbytes = value('max(penstock_held_bytes{model="llama"})')
    assert nbytes > 0
    first = f'penstock_received_bytes_total{{journey="fetch", instance="{fleet.instances["first"]}"}}'
    assert value(first) == nbytes
    assert {series["metric"]["source"] for series in fleet.query(first)} == {"peer"}
    assert value(f'penstock_tier_used_bytes{{instance="{fleet.instances["keeper"]}"}}') >= nbytes
    assert value("max(penstock_tier_limit_bytes)") == 64 * MIB
    assert value('penstock_publish_subscribers_total{result="committed"}') == 2
    assert value("sum(penstock_pause_seconds_count)") == 2
    # Only metrics in the tables exist, in every process.
    names = {name for name in fleet.api("label/__name__/values") if name.startswith("penstock_")}
    known = {metric.name for metric in METRICS}
    own = {re.sub(r"_(total|bucket|count|sum|created)$", "", name) for name in names}
    assert {name for name in own if not name.startswith("penstock_hub_")} <= known
    missing = known - own
    assert not missing, "metrics that no process of the fleet shows"


def test_dashboard_expressions_have_data_and_alerts_fire(fleet: Fleet) -> None:
    sync(fleet, 1)
    wait_until(lambda: fleet.query('penstock_sync_version{side="subscriber"} == 1'), "version 1 is read")

    # Every selector in a rule names existing series, because an alert with a wrong name would never fire.
    selectors = {selector for rule in rules() for selector in SELECTOR.findall(rule["expr"])}
    assert len(selectors) >= len(rules())
    for selector in sorted(selectors):
        wait_until(lambda selector=selector: fleet.query(selector), f"{selector} has data")
    wait_until(lambda: not fleet.firing(), "no alert fires in a fleet that is well")
    assert {rule["health"] for rule in fleet.alerts().values()} == {"ok"}
    assert len(fleet.alerts()) == len(rules())

    # This journey fails, because the version is live already and an older one is requested.
    subscriber = fleet.members["subscriber"]
    assert isinstance(subscriber, SyncWorker)
    assert subscriber.call("update 0")["error"] == "ConfigError"
    instance = fleet.instances["subscriber"]
    wait_until(lambda: fleet.firing() == {"PenstockJourneysFail": {instance}}, f"one alert fires, not {fleet.firing()}")

    sync(fleet, 2)
    # Refusals are counted by status, and there were none.
    assert not answers(f"http://{fleet.hub}/v1/status")
    bare = expressions()
    deadline = time.monotonic() + 20
    while bare and time.monotonic() < deadline:
        bare = [expression for expression in bare if not fleet.query(expression)]
    assert not bare, "expressions of the dashboard without data"

    check_numbers(fleet)

    fleet.members["second"].kill()
    dead = {"PenstockProcessDown": {fleet.instances["second"]}, "PenstockJourneysFail": {instance}}
    wait_until(lambda: fleet.firing() == dead, f"the alert for a dead member fires, not {fleet.firing()}")
    alert = next(one for one in fleet.alerts()["PenstockProcessDown"]["alerts"] if one["state"] == "firing")
    assert alert["annotations"]["summary"] == f"{fleet.instances['second']} does not answer"
