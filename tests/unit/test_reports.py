"""All reports are alike: `str` is the summary, and `to_dict` is JSON. Weights have a short `repr`."""

from __future__ import annotations

import html
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import penstock as ps
from penstock.report import Readable, Summarised


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    tensors = {f"layers.{number}.<w>": torch.full((4, 8), number).bfloat16() for number in range(30)}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def test_every_public_report_has_summary() -> None:
    public = [ps, ps.cache, ps.reports]
    reports = {name: getattr(module, name) for module in public for name in module.__all__ if name.endswith("Report")}
    assert sorted(reports) == [
        "AttachReport",
        "ConvertReport",
        "FetchReport",
        "InspectReport",
        "LoadReport",
        "ManifestReport",
        "PublishReport",
        "UpdateReport",
        "VerifyReport",
    ]
    for report in reports.values():
        assert issubclass(report, Readable) and callable(report.summary)
        assert report.summary is not Summarised.summary


def test_operation_reports_have_documented_fields(directory: Path) -> None:
    written = ps.manifest(directory)
    assert written.num_leaves == written.num_tensors == 30
    weights = ps.load(directory)
    converted = ps.convert(directory, directory.parent / "out", devices="cpu", workers=1)
    target: dict[str, torch.Tensor] = {}
    with ps.join("m", connection=ps.ConnectionSettings(transports=["loopback"])) as fleet:
        fetched = fleet.fetch(target, fallback=directory)
        seen = ps.hub.status("m")
        assert [holding.identity.model for member in seen.members for holding in member.holdings] == ["m"]
        assert ps.hub.why("m").lines
    for report in (written, weights.report, converted, fetched, ps.inspect(directory), ps.verify(directory)):
        assert str(report) == report.summary()
        assert report._repr_html_() == f"<pre>{html.escape(report.summary())}</pre>"
        fields = report.to_dict()
        assert json.loads(json.dumps(fields)) == fields
        assert fields["nbytes"] == 30 * 64
        assert fields["revision"] == written.revision or report is converted


def test_weights_have_short_repr(directory: Path) -> None:
    weights = ps.load(directory, "cpu")  # The device is positional, as in safetensors.
    assert repr(weights) == f"<Weights of {directory}: 30 tensors, 1.92 kB on cpu, not verified>"
    shown = weights._repr_html_()
    assert "&lt;w&gt;  bfloat16 [4, 8]" in shown
    assert shown.count("bfloat16") == 20
    assert "... and 10 more" in shown
    with ps.stream(directory, "cpu") as tensors:
        assert len(dict(tensors)) == 30


def test_report_writes_manifest_to_requested_path(directory: Path, tmp_path: Path) -> None:
    report = ps.manifest(directory, out=tmp_path / "digests")
    assert report.written == (str(tmp_path / "digests"),)
    assert not ps.verify(directory).verified
    with pytest.raises(ps.ConfigError, match="cannot write to an http"):
        ps.manifest(directory, out="http://host/digests")
    with pytest.raises(ps.ConfigError, match="cannot read the key"):
        ps.manifest(directory, sign=tmp_path / "absent.pem")


def test_manifest_for_changed_weights_raises_without_replace(directory: Path) -> None:
    first = ps.manifest(directory)
    again = ps.manifest(directory)
    assert again.written == () and "up to date" in str(again) and again.revision == first.revision
    save_file({"layers.0.<w>": torch.ones(4)}, directory / "model.safetensors")
    with pytest.raises(ps.IntegrityError, match="Nothing was written"):
        ps.manifest(directory)
    assert ps.manifest(directory, replace=True).revision != first.revision
    assert ps.verify(directory).verified
