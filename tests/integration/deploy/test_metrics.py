"""The metrics endpoint of a process, what journeys add to it, and their spans of OpenTelemetry."""

from __future__ import annotations

import os
import re
import secrets
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from tests.support.servers.http_server import Faults, RangeServer

import penstock as ps
from penstock.net.listener import bound_socket
from penstock.report import TransferStats
from penstock.telemetry import endpoint as endpoint_module
from penstock.telemetry.journey import Journey
from penstock.telemetry.metrics import MAX_MODELS, METRICS, Ended, Registry, Sample, recording, watch
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB
from penstock_hub.directory import Directory
from penstock_hub.metrics import Metrics as HubMetrics
from penstock_hub.store import MemoryStore

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.token"
    path.write_text(f"# of the scraper\n{secrets.token_hex(16)}\n")
    return path


@pytest.fixture
def endpoint(token_file: Path) -> Iterator[ps.telemetry.MetricsEndpoint]:
    with ps.telemetry.serve_metrics("127.0.0.1:0", token_file=token_file) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama"
    write_llama(path, total_bytes=4 * MIB, shards=2)
    return path


def get(url: str, authorization: str | None = None, method: str = "GET") -> tuple[int, str, str]:
    """Return status, content type and body."""
    headers = {} if authorization is None else {"Authorization": authorization}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers, method=method), timeout=10) as reply:
            return reply.status, reply.headers.get("Content-Type", ""), reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", ""


def bearer(token_file: Path) -> str:
    return f"Bearer {token_file.read_text().split()[-1]}"


def values(url: str, token_file: Path) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return every sample of a scrape by name and labels."""
    status, _, page = get(url, bearer(token_file))
    assert status == 200
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


class Scrape:
    """Return the difference between two scrapes, because a process keeps its registry."""

    def __init__(self, endpoint: ps.telemetry.MetricsEndpoint, token_file: Path) -> None:
        self._endpoint, self._token_file = endpoint, token_file
        self._before = values(endpoint.url, token_file)

    def added(self, name: str, **labels: str) -> float:
        key = name, frozenset(labels.items())
        return values(self._endpoint.url, self._token_file).get(key, 0.0) - self._before.get(key, 0.0)


@pytest.fixture
def scrape(endpoint: ps.telemetry.MetricsEndpoint, token_file: Path) -> Scrape:
    return Scrape(endpoint, token_file)


def test_metrics_request_without_valid_token_is_rejected(
    endpoint: ps.telemetry.MetricsEndpoint, token_file: Path
) -> None:
    token = bearer(token_file)
    for wrong in (None, "", "Bearer ", "Bearer wrong", token.replace("Bearer", "Basic"), token[:-1], f"{token}0"):
        assert get(endpoint.url, wrong)[0] == 401
    assert get(endpoint.url.replace("/metrics", "/"))[0] == 401
    status, content_type, page = get(endpoint.url, token)
    assert (status, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert "penstock_info{" in page
    assert get(endpoint.url.replace("/metrics", "/other"), token)[0] == 404
    assert get(endpoint.url, token, method="POST")[0] == 405


def test_changed_metrics_token_applies_without_restart(
    endpoint: ps.telemetry.MetricsEndpoint, token_file: Path
) -> None:
    old = bearer(token_file)
    token_file.write_text("a-new-token-of-the-scraper\n")
    assert get(endpoint.url, old)[0] == 401
    assert get(endpoint.url, bearer(token_file))[0] == 200
    token_file.unlink()
    assert get(endpoint.url, "Bearer a-new-token-of-the-scraper")[0] == 401


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ("9464", "not an address"),
        ("127.0.0.1:9-8", "not a range"),
        ("127.0.0.1:70000", "not a range"),
        (":1", "not an"),
    ],
)
def test_wrong_metrics_address_raises_config_error(listen: str, message: str, token_file: Path) -> None:
    with pytest.raises(ps.ConfigError, match=message):
        ps.telemetry.serve_metrics(listen, token_file=token_file)


def test_loopback_metrics_endpoint_requires_token(tmp_path: Path) -> None:
    with pytest.raises(ps.ConfigError, match="requires a token"):
        ps.telemetry.serve_metrics("127.0.0.1:0")
    empty = tmp_path / "empty"
    empty.write_text("# none\nshort\n")
    with pytest.raises(ps.ConfigError, match="fewer than 16"):
        ps.telemetry.serve_metrics("127.0.0.1:0", token_file=empty)
    with pytest.raises(ps.ConfigError, match="cannot read the metrics token file"):
        ps.telemetry.serve_metrics("127.0.0.1:0", token_file=tmp_path / "none")


def test_second_metrics_endpoint_in_one_process_is_rejected(
    endpoint: ps.telemetry.MetricsEndpoint, token_file: Path
) -> None:
    with pytest.raises(ps.ConfigError, match="already"):
        ps.telemetry.serve_metrics("127.0.0.1:0", token_file=token_file)
    endpoint.close()
    with ps.telemetry.serve_metrics("127.0.0.1:0", token_file=token_file) as again:
        assert get(again.url, bearer(token_file))[0] == 200


def test_metrics_endpoint_binds_first_free_port(token_file: Path) -> None:
    # Return two neighbouring free ports, of which the first is then taken.
    while True:
        with bound_socket(("127.0.0.1", 0)) as taken:
            taken.listen()
            port = taken.getsockname()[1]
            try:
                bound_socket(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
            with ps.telemetry.serve_metrics(f"127.0.0.1:{port}-{port + 1}", token_file=token_file) as endpoint:
                assert endpoint.url == f"http://127.0.0.1:{port + 1}/metrics"
            with pytest.raises(ps.ConfigError, match="range of ports"):
                ps.telemetry.serve_metrics(f"127.0.0.1:{port}", token_file=token_file)
            return


@pytest.fixture
def untried(monkeypatch) -> Iterator[None]:
    """Treat this process as one that has not served yet. Close its server at the end."""
    monkeypatch.setattr(endpoint_module, "_refused_in", 0)
    yield
    if endpoint_module._endpoint is not None:
        endpoint_module._endpoint.close()


def test_environment_variable_enables_metrics_endpoint(
    llama: Path, token_file: Path, monkeypatch, caplog, untried: None
) -> None:
    ps.load(llama)
    assert endpoint_module._endpoint is None
    monkeypatch.setenv("PENSTOCK_METRICS", "127.0.0.1:0")
    with pytest.raises(ps.ConfigError, match="requires a token"):
        ps.load(llama)
    monkeypatch.setenv("PENSTOCK_METRICS_TOKEN_FILE", str(token_file))
    with caplog.at_level("INFO", logger="penstock.metrics"):
        ps.load(llama)
        ps.load(llama)
    (url,) = (record.message.removeprefix("metrics at ") for record in caplog.records)
    assert get(url, bearer(token_file))[0] == 200


def test_occupied_metrics_port_logs_warning(llama: Path, token_file: Path, monkeypatch, caplog, untried: None) -> None:
    with bound_socket(("127.0.0.1", 0)) as taken:
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("PENSTOCK_METRICS", address)
        monkeypatch.setenv("PENSTOCK_METRICS_TOKEN_FILE", str(token_file))
        for _ in range(2):
            assert len(ps.load(llama))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"cannot serve metrics at {address}" in record.message


def test_loads_are_counted_by_result_and_path(llama: Path, scrape: Scrape) -> None:
    weights = ps.load(llama)
    assert scrape.added("penstock_journeys_total", journey="load", result="ok") == 1
    received = scrape.added("penstock_received_bytes_total", journey="load", model="", source="storage", path="mmap")
    assert received == weights.report.read_bytes
    assert scrape.added("penstock_journey_seconds_count", journey="load", model="") == 1
    phases = [
        scrape.added("penstock_phase_seconds_total", journey="load", phase=phase) for phase in weights.report.phases
    ]
    assert sum(phases) == pytest.approx(weights.report.wall_s)
    with pytest.raises(ps.NotFound):
        ps.load(llama.parent / "none")
    assert scrape.added("penstock_journeys_total", journey="load", result="failed") == 1
    assert scrape.added("penstock_errors_total", journey="load", error="NotFound") == 1


def test_running_and_cancelled_operations_are_counted(llama: Path, scrape: Scrape) -> None:
    with ps.stream(llama, settings=ps.ReadSettings(copy=True)) as stream:
        next(stream)
        assert scrape.added("penstock_journeys_running", journey="load") == 1
        paths = ("page-cache", "buffered", "direct")
        labels = {"journey": "load", "model": "", "source": "storage"}
        assert sum(scrape.added("penstock_received_bytes_total", path=path, **labels) for path in paths) > 0
    assert scrape.added("penstock_journeys_running", journey="load") == 0
    assert scrape.added("penstock_journeys_total", journey="load", result="cancelled") == 1
    with ps.stream(llama) as stream:
        num_tensors = len(list(stream))
    assert num_tensors == stream.report.num_tensors
    assert scrape.added("penstock_journeys_total", journey="load", result="ok") == 1


def test_corrupt_bytes_are_counted_as_verification_failure(tmp_path: Path, scrape: Scrape) -> None:
    write_llama(tmp_path / "llama", total_bytes=4 * MIB, shards=1)
    ps.manifest(tmp_path / "llama")
    weights = ps.load(tmp_path / "llama")
    assert weights.report.verified
    assert scrape.added("penstock_verified_bytes_total", journey="load", model="") == weights.report.nbytes
    del weights
    file = next((tmp_path / "llama").glob("*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(ps.IntegrityError):
        ps.load(tmp_path / "llama")
    assert scrape.added("penstock_verification_failures_total", journey="load") == 1


def test_cache_hits_and_retries_are_counted(llama: Path, tmp_path: Path, scrape: Scrape, monkeypatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    with RangeServer(llama) as server:
        uri = f"{server.url}/model.safetensors.index.json"
        report = ps.load(uri).report
        nbytes = scrape.added("penstock_cache_missed_bytes_total")
        misses = scrape.added("penstock_cache_chunks_total", result="miss")
        assert nbytes >= report.nbytes
        assert misses > 0
        cached = {"journey": "load", "model": "", "source": "cache", "path": "cache"}
        before = scrape.added("penstock_received_bytes_total", **cached)
        report = ps.load(uri).report
        assert scrape.added("penstock_cache_chunks_total", result="miss") == misses
        assert scrape.added("penstock_cache_chunks_total", result="hit") > 0
        assert scrape.added("penstock_received_bytes_total", **cached) == before + report.read_bytes
        assert scrape.added("penstock_storage_retries_total") == 0
        monkeypatch.delenv("PENSTOCK_CACHE_DIR")
        server.faults = Faults(status=503, num_requests=3)
        ps.load(uri)
        assert scrape.added("penstock_storage_retries_total") == 3


def test_fetches_and_corruption_are_counted_by_source(llama: Path, scrape: Scrape, monkeypatch) -> None:
    # Use a short directory, because the path of a Unix socket is limited.
    with tempfile.TemporaryDirectory(prefix="ps-") as runtime:
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", runtime)
        only_http = ps.ConnectionSettings(transports=["http"])
        with ps.join("damaged", connection=only_http) as first, ps.join("damaged", connection=only_http) as second:
            tensors: dict[str, torch.Tensor] = {}
            nbytes = first.fetch(tensors, fallback=llama).nbytes
            second.fetch({})
            labels = {"journey": "fetch", "model": "damaged"}
            received = "penstock_received_bytes_total"
            assert scrape.added(received, source="storage", path="fallback", **labels) == nbytes
            assert scrape.added(received, source="peer", path="http", **labels) == nbytes
            # This includes the gaps between neighbours, which are read along with them.
            assert nbytes <= scrape.added("penstock_served_bytes_total") < 1.1 * nbytes
            # The bytes from storage were hashed on arrival, because there was nothing to compare them with.
            assert scrape.added("penstock_verified_bytes_total", **labels) == nbytes
            assert scrape.added("penstock_held_bytes", model="damaged", tier="host", state="whole") == 2 * nbytes
            assert scrape.added("penstock_members", hub="reachable") == 2

            min(tensors.items())[1].view(-1).view(torch.uint8)[0] ^= 1
            (weights,) = first.member.weights
            assert first.member.recheck(weights, 0)
            assert scrape.added("penstock_verification_failures_total", journey="serve") == 1
            assert scrape.added("penstock_held_bytes", model="damaged", tier="host", state="damaged") == nbytes
        assert scrape.added("penstock_members", hub="reachable") == 0


def test_chunks_with_wrong_digest_are_counted(llama: Path, scrape: Scrape, monkeypatch) -> None:
    with tempfile.TemporaryDirectory(prefix="ps-") as runtime:
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", runtime)
        with ps.join("wrong") as holder, ps.join("wrong") as reader:
            tensors: dict[str, torch.Tensor] = {}
            # Otherwise a heartbeat may find the damage first, and the holder serves nothing.
            monkeypatch.setattr(holder.member, "_spot_check", lambda: None)
            holder.fetch(tensors, fallback=llama)
            for tensor in tensors.values():
                tensor.view(-1).view(torch.uint8)[0] ^= 1
            # The bytes are from storage, because all chunks of the holder are wrong.
            report = reader.fetch({}, fallback=llama)
        assert report.faults
        assert scrape.added("penstock_verification_failures_total", journey="fetch") >= 1
        assert scrape.added("penstock_retries_total", journey="fetch") == len(report.faults)


def test_conversion_metrics_are_counted(llama: Path, tmp_path: Path, scrape: Scrape) -> None:
    report = ps.convert(llama, tmp_path / "out", to="cast:F32", devices="cpu", workers=1)
    assert scrape.added("penstock_journeys_total", journey="convert", result="ok") == 1
    labels = {"journey": "convert", "model": "", "source": "storage", "path": "workers"}
    assert scrape.added("penstock_received_bytes_total", **labels) == report.fetched_bytes > 0
    phases = [
        scrape.added("penstock_phase_seconds_total", journey="convert", phase=phase)
        for phase in ("start", "move", "end")
    ]
    assert sum(phases) == pytest.approx(report.wall_s)


class Loaded(TransferStats):
    """A report of one byte."""

    def summary(self) -> str:
        return "one byte"


def test_number_of_model_labels_is_limited() -> None:
    registry = Registry()
    for number in range(MAX_MODELS + 3):
        journey = Journey("fetch", f"model-{number}")
        journey.report = Loaded(nbytes=1, verified_bytes=1, wall_s=1.0, phases={}, revision="")
        registry.begin(journey)
        registry.end(journey, Ended(result="ok", error="", seconds=1.0, received={}))
    verified = registry.values()["penstock_verified_bytes"]
    assert len(verified) == MAX_MODELS + 1
    assert verified["fetch", "other"] == 3


def test_stream_garbage_collected_during_scrape_is_counted(
    llama: Path, endpoint: ps.telemetry.MetricsEndpoint, scrape: Scrape
) -> None:
    registry = recording()
    assert registry is not None
    stream = ps.stream(llama)
    next(stream)
    # This is like a finalizer in the thread of a scrape, which already holds the lock.
    with registry._lock:
        del stream
        assert not [journey for journey in registry._journeys if journey.ended is None]
    assert scrape.added("penstock_journeys_total", journey="load", result="cancelled") == 1
    assert scrape.added("penstock_journeys_running", journey="load") == 0


def test_metrics_scrape_succeeds_while_operations_finish() -> None:
    class Living:
        def samples(self) -> Iterator[Sample]:
            yield "penstock_members", ("of a test",), 1

    registry = Registry()
    is_over = threading.Event()
    living: deque[Living] = deque(maxlen=500)

    def come_and_go() -> None:
        while not is_over.is_set():
            living.append(Living())
            watch(living[-1])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(300):
            registry.values()
    finally:
        is_over.set()
        thread.join(30.0)
        sys.setswitchinterval(before)
    living.clear()
    kept = Living()
    watch(kept)
    assert b'penstock_members{hub="of a test"} 1.0' in registry.page()
    del kept
    assert b'penstock_members{hub="of a test"}' not in registry.page()


def test_metric_names_follow_prometheus_conventions() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert metric.name.startswith("penstock_")
        assert not metric.name.endswith("_total"), "the text format adds it"
        assert not metric.name.endswith(("_ms", "_mb", "_gb"))
        assert metric.about.endswith(".")
        assert (metric.kind == "histogram") == bool(metric.buckets)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns of what is tested here
def test_forked_child_does_not_own_metrics_endpoint(endpoint: ps.telemetry.MetricsEndpoint, llama: Path) -> None:
    assert endpoint.is_ours
    pid = os.fork()
    if not pid:
        # The child counts nothing and does not fail, because the registry and its lock belong to the parent.
        done = 1
        try:
            ps.load(llama)
            done = int(endpoint.is_ours)
        finally:
            os._exit(done)
    assert os.waitpid(pid, 0)[1] == 0


def test_documentation_lists_every_metric() -> None:
    text = (ROOT / "docs" / "operate" / "metrics.md").read_text(encoding="utf-8")
    of_processes = text.partition("## The metrics of a process")[2].partition("\n## ")[0]
    rows = [line for line in of_processes.splitlines() if line.startswith("| `penstock_")]
    assert rows == [
        f"| `{metric.name}{'_total' * (metric.kind == 'counter')}` |"
        f"{' ' + ', '.join(f'`{label}`' for label in metric.labels) if metric.labels else ''} | {metric.about} |"
        for metric in METRICS
    ]
    of_hub = text.partition("## The metrics of the hub")[2].partition("\n## ")[0]
    page = HubMetrics(Directory(MemoryStore())).page().decode()
    families = [family for family in text_string_to_metric_families(page) if not family.name.endswith("_created")]
    listed = dict(re.findall(r"^\| `(penstock_\w+)` \| .*?\| (.*) \|$", of_hub, re.M))
    assert listed == {f"{f.name}{'_total' * (f.type == 'counter')}": f.documentation for f in families}


def test_documentation_lists_every_alert() -> None:
    text = (ROOT / "docs" / "operate" / "metrics.md").read_text(encoding="utf-8")
    rules = (ROOT / "deploy" / "prometheus" / "penstock.rules.yml").read_text(encoding="utf-8")
    alerts = re.findall(r"- alert: (\w+)\n(?:.*\n)+?.*severity: (\w+)", rules)
    assert re.findall(r"^\| `(Penstock\w+)` \| (\w+) \|", text, re.M) == alerts
