"""The pods of the manifests, started as the kubelet would: commands, users, volumes, probes."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import container, kubernetes
from tests.support.authority import Authority
from tests.support.container import Container, Mount
from tests.support.kubernetes import POD_IP, Node, find, render

import penstock as ps
from penstock.cli.checkpoints import manifest
from penstock.testing.checkpoints import write_llama

pytestmark = pytest.mark.slow
TOKEN, METRICS_TOKEN = "a-token-of-this-fleet", "a-token-of-prometheus"
TOKENS = f"an-operators-token @operator\n{TOKEN} llama*\n{METRICS_TOKEN} only-metrics\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bucket") / "llama"
    write_llama(directory, total_bytes=30_000_000, shards=2)
    (directory / "config.json").write_text("{}")
    # pytest's directories are for this user only, and the pods have another one.
    directory.parent.chmod(0o755)
    manifest(str(directory))
    return directory


@pytest.fixture
def node(tmp_path: Path, model: Path) -> Iterator[Node]:
    for why in (container.missing(), None if kubernetes.kubectl() else "kubectl is not installed"):
        if why is not None:
            pytest.skip(why)
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("redis-server is not installed: scripts/setup_redis.sh")
    authority = Authority(tmp_path)
    certificate, key = authority.sign("penstock-hub", "penstock-hub")
    fleet = {"MODEL": "llama", "WEIGHTS": "/bucket/llama/"}
    objects = render(tmp_path, "overlays/sglang", components=["monitoring"], fleet=fleet)
    secrets = {
        "penstock-tokens": {"tokens": TOKENS.encode()},
        "penstock-member": {"token": TOKEN.encode()},
        "penstock-metrics": {"token": METRICS_TOKEN.encode()},
        "penstock-redis": {"password": b"0123456789abcdef\n"},
        "penstock-hub-tls": {"tls.crt": certificate.read_bytes(), "tls.key": key.read_bytes()},
        "penstock-hub-ca": {"ca.crt": authority.ca_file.read_bytes()},
    }
    storage = Mount(source=model.parent, target="/bucket", read_only=True)
    with Node(tmp_path / "node", objects, secrets, {"valkey-server": Path(server)}, [storage]) as running:
        yield running


def wait_for_line(log: Path, text: str, process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while text not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def check_monitoring(node: Node) -> None:
    """Read the metrics as the monitors tell Prometheus to."""
    (hub,) = find(node.objects, "ServiceMonitor", "penstock-hub")["spec"]["endpoints"]
    (service,) = find(node.objects, "Service", hub["tlsConfig"]["serverName"])["spec"]["ports"]
    (member,) = find(node.objects, "PodMonitor", "penstock-members")["spec"]["podMetricsEndpoints"]
    (keeper,) = find(node.objects, "DaemonSet", "penstock-cache")["spec"]["template"]["spec"]["containers"]
    (port,) = [port["containerPort"] for port in keeper["ports"] if port["name"] == member["port"]]
    authority = node.directory / "ca.crt"
    ca = hub["tlsConfig"]["ca"]["configMap"]
    authority.write_bytes(node.secrets[ca["name"]][ca["key"]])
    name = f"{hub['tlsConfig']['serverName']}:{service['port']}"
    trust = ["--cacert", authority, "--resolve", f"{name}:{POD_IP}"]
    for endpoint, url, metric in (
        (hub, f"{hub['scheme']}://{name}{hub['path']}", "penstock_hub_members"),
        (member, f"http://{POD_IP}:{port}{member['path']}", "penstock_"),
    ):
        credentials = endpoint["authorization"]["credentials"]
        token = node.secrets[credentials["name"]][credentials["key"]].decode()
        page = node.network.run("curl", "-sSf", *trust, "-H", f"Authorization: Bearer {token}", url)
        assert page.returncode == 0 and metric in page.stdout, page
        assert node.network.run("curl", "-sSf", *trust, url).returncode == 22


def test_engine_pod_reads_weights_from_node_cache(node: Node, model: Path) -> None:
    redis = node.pod("Deployment", "penstock-redis")
    redis_process, _ = redis.start()
    redis.probe("readinessProbe")
    hub = node.pod("Deployment", "penstock-hub")
    hub_process, hub_log = hub.start()
    hub.probe("startupProbe")
    hub.probe("readinessProbe")

    keeper = node.pod("DaemonSet", "penstock-cache")
    keeper.initialize()
    runtime = node.directory / "host" / "run" / "penstock"
    assert (runtime.stat().st_mode & 0o777, runtime.stat().st_uid) == (0o700, 10001)
    keeper_process, keeper_log = keeper.start()
    keeper.probe("startupProbe")
    keeper.probe("livenessProbe")
    wait_for_line(keeper_log, "keeping llama", keeper_process)

    engine = node.pod("Deployment", "sglang")
    said = engine.initialize()["storage-initializer"].stdout
    files = node.directory / "pod-sglang" / "volumes" / "models" / "llama"
    assert ps.verify(str(files)).revision == ps.verify(str(model)).revision
    assert (files / "config.json").read_text() == "{}"
    assert "/models/llama: 3 files" in said and "verified: the manifest's digests" in said, said
    # The configuration, two bytes, came from storage.
    assert "100% shm <- " in said, said
    assert "penstock.audit event=issued" in hub_log.read_text()
    check_monitoring(node)

    spec = find(node.objects, "DaemonSet", "penstock-cache")["spec"]["template"]["spec"]
    for process in (keeper_process, hub_process, redis_process):
        Container.send_signal(process, signal.SIGTERM)
    assert keeper_process.wait(spec["terminationGracePeriodSeconds"]) == 0, keeper_log.read_text()
    assert hub_process.wait(30) == 0, hub_log.read_text()
