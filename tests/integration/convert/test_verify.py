"""Real workers compare inputs of conversions with their manifests.

Errors name the wrong tensor, and nothing is published.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import xxhash
from tests.support.compare import assert_same, by_safetensors
from tests.support.jobs import convert_as
from tests.support.servers.http_server import RangeServer

import penstock
from penstock.cli.checkpoints import manifest
from penstock.errors import IntegrityError, NotFound
from penstock.testing.checkpoints import write_llama

pytestmark = pytest.mark.usefixtures("launcher_fork_servers")

TOLD: dict[str, Any] = {"devices": "cpu", "workers": 1, "task_bytes": "256K"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two copies of one model. `sealed` has a manifest and `bare` has none."""
    made = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate(("bare", "sealed")):
        write_llama(made / name, total_bytes=6_000_000, fp8=False, seed=seed)
    manifest(str(made / "sealed"))
    return made


def damaged(source: Path, into: Path) -> Path:
    """Return a copy with one flipped bit in its last shard."""
    shutil.copytree(source, into)
    path = sorted(into.glob("*.safetensors"))[-1]
    raw = bytearray(path.read_bytes())
    raw[-100_000] ^= 1
    path.write_bytes(raw)
    return path


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["sealed"], {"to": "fp8-block128"}),
        (["sealed", "sealed"], {"operations": [{"op": "slerp", "t": 0.5}]}),
        (["bare", "sealed"], {"operations": [{"op": "average"}]}),
    ],
)
def test_flipped_source_bit_fails_conversion(
    names: list[str], told: Mapping[str, Any], sources: Path, tmp_path: Path
) -> None:
    path = damaged(sources / names[-1], tmp_path / "damaged")
    places = [*(sources / name for name in names[:-1]), path.parent]
    with pytest.raises(IntegrityError) as caught:
        convert_as(places, tmp_path / "out", **told, **TOLD)
    error, at = caught.value, path.stat().st_size - 100_000
    assert error.uri == str(path) and error.tensor and not error.mutated
    assert error.byte_range is not None and error.byte_range[0] <= at < error.byte_range[1]
    assert [one.name for one in tmp_path.iterdir()] == ["damaged"]


def test_conversion_report_counts_verified_bytes(sources: Path, tmp_path: Path) -> None:
    nbytes = sum(one.stat().st_size for one in (sources / "sealed").glob("*.safetensors"))
    report = convert_as(sources / "sealed", tmp_path / "one", **TOLD)
    assert report.verified and 0.9 * nbytes < report.verified_bytes == report.read_bytes
    report = convert_as(
        [sources / "bare", sources / "sealed"], tmp_path / "two", operations=[{"op": "average"}], **TOLD
    )
    assert not report.verified and 0.9 * nbytes < report.verified_bytes < report.read_bytes
    assert report.why == f"1 of 2 sources have no digests: no manifest at {sources / 'bare' / 'penstock.manifest'}"
    assert penstock.verify(tmp_path / "two").verified


def test_disabled_verification_checks_no_bytes(sources: Path, tmp_path: Path) -> None:
    path = damaged(sources / "sealed", tmp_path / "damaged")
    report = convert_as(path.parent, tmp_path / "out", verify=False, **TOLD)
    assert (report.verified, report.verified_bytes, report.why) == (False, 0, "verify=False")
    with pytest.raises(NotFound, match="verify=True, but no manifest at ") as caught:
        convert_as(
            [path.parent, sources / "bare"], tmp_path / "two", operations=[{"op": "average"}], verify=True, **TOLD
        )
    assert caught.value.hint == "write one with `penstock manifest URI`"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["damaged", "out"]


def test_corrupt_cached_bytes_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path / "made", total_bytes=2_000_000, shards=1)
    manifest(str(tmp_path / "made" / "model.safetensors"))
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    with RangeServer({one.name: one.read_bytes() for one in (tmp_path / "made").iterdir()}) as server:
        uri = f"{server.url}/model.safetensors"
        penstock.load(uri)
        (chunk,) = (one for one in (tmp_path / "cache").rglob("0*") if one.stat().st_size > 1_000_000)
        raw = bytearray(chunk.read_bytes()[:-24])
        raw[-10_000] ^= 1
        chunk.write_bytes(raw + struct.pack("<8sQQ", b"PSCHUNK1", len(raw), xxhash.xxh3_64_intdigest(raw)))
        report = convert_as(uri, tmp_path / "out", verify=True, **TOLD)
        assert report.verified and report.fetched_bytes >= len(raw)
    assert penstock.verify(tmp_path / "out").verified
    assert_same(by_safetensors(tmp_path / "out"), by_safetensors(tmp_path / "made"))
