"""Spans of each journey, collected by the SDK of OpenTelemetry in this process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")

import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import penstock as ps
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB


@pytest.fixture(scope="module")
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # Set it once per process, because the API allows no second provider.
    trace.set_tracer_provider(provider)
    yield exporter
    provider.shutdown()


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> InMemorySpanExporter:
    exporter.clear()
    return exporter


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama"
    write_llama(path, total_bytes=4 * MIB, shards=2)
    return path


@pytest.fixture
def runtime(monkeypatch) -> Iterator[None]:
    """Use a separate hub whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="ps-") as directory:
        monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", directory)
        yield


def only(exporter: InMemorySpanExporter, name: str) -> ReadableSpan:
    """Return the only span with this name."""
    (span,) = (span for span in exporter.get_finished_spans() if span.name == name)
    return span


def test_load_span_records_parent_and_report_values(llama: Path, spans) -> None:
    with trace.get_tracer("test").start_as_current_span("boot") as boot:
        report = ps.load(llama).report
    span = only(spans, "penstock load")
    assert span.parent is not None
    assert span.parent.span_id == boot.get_span_context().span_id
    assert span.status.status_code is StatusCode.UNSET
    attributes = dict(span.attributes or {})
    assert attributes["penstock.bytes"] == report.nbytes
    assert attributes["penstock.path"] == report.path
    assert attributes["penstock.revision"] == report.revision
    assert attributes["penstock.device"] == "cpu"
    assert str(attributes["penstock.uri"]).endswith("llama")
    assert {name: attributes[f"penstock.phase.{name}_s"] for name in report.phases} == dict(report.phases)


def test_recorded_error_contains_no_uri_secrets(tmp_path: Path, spans) -> None:
    with pytest.raises(ps.SourceError):
        ps.load("http://user:secret@127.0.0.1:9/model?sig=secret")
    span = only(spans, "penstock load")
    assert span.status.status_code is StatusCode.ERROR
    attributes = dict(span.attributes or {})
    assert attributes["error.type"] == "SourceUnavailable"
    assert attributes["penstock.blame"] == "source"
    assert attributes["penstock.mutated"] is False
    assert [event.name for event in span.events] == ["exception"]
    assert "secret" not in span.to_json()


def test_stream_span_lasts_until_last_tensor(llama: Path, spans) -> None:
    with ps.stream(llama) as stream:
        next(stream)
        assert spans.get_finished_spans() == ()
        # Its span is not current in the code between two tensors.
        assert not trace.get_current_span().get_span_context().is_valid
        list(stream)
    assert dict(only(spans, "penstock load").attributes or {})["penstock.bytes"] == stream.report.nbytes


def test_fetch_span_records_paths_and_members(llama: Path, runtime: None, spans) -> None:
    with ps.join("llama") as first, ps.join("llama") as second:
        first.fetch({}, fallback=llama)
        spans.clear()
        report = second.fetch({})
        attributes = dict(only(spans, "penstock fetch").attributes or {})
    assert attributes["penstock.model"] == "llama"
    assert attributes["penstock.member"] == second.member.id[:8]
    assert first.member.id[:8] in str(attributes["penstock.path"])
    assert attributes["penstock.bytes"] == attributes["penstock.verified_bytes"] == report.nbytes


def test_publish_and_update_spans_record_version(runtime: None, spans) -> None:
    weights = {"w": torch.arange(64.0)}
    target = {"w": torch.zeros(64)}
    with ps.publisher("policy", weights, mode="snapshot") as publisher, ps.subscriber("policy", target) as subscriber:
        publisher.publish(7)
        report = subscriber.update()
        publisher.publish(8)
        subscriber.stage()
        subscriber.commit()
    assert torch.equal(target["w"], weights["w"])
    names = [span.name.removeprefix("penstock ") for span in spans.get_finished_spans()]
    assert names == ["publish", "update", "publish", "stage", "commit"]
    update = dict(only(spans, "penstock update").attributes or {})
    assert (update["penstock.model"], update["penstock.version"]) == ("policy", 7)
    assert (update["penstock.bytes"], update["penstock.pause_s"]) == (report.nbytes, report.pause_s)
    assert sum(report.nbytes_by_path.values()) == report.nbytes


def test_conversion_span_records_operation_name(llama: Path, tmp_path: Path, spans) -> None:
    report = ps.convert(llama, tmp_path / "out", to="cast:F32", devices="cpu", workers=1)
    attributes = dict(only(spans, "penstock convert").attributes or {})
    assert attributes["penstock.operation"] == report.operation
    assert attributes["penstock.bytes"] == report.nbytes
    assert attributes["penstock.uri"] == str(tmp_path / "out")


def test_process_without_telemetry_imports_no_telemetry_libraries(llama: Path) -> None:
    imported = "{m.partition('.')[0] for m in sys.modules} & {'opentelemetry', 'prometheus_client'}"
    code = f"import sys, penstock as ps; ps.load(sys.argv[1]); sys.exit(len({imported}))"
    assert subprocess.run([sys.executable, "-c", code, str(llama)], check=False).returncode == 0
