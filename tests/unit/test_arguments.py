"""Wrong arguments raise ConfigError in every verb before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import penstock as ps
import penstock_compile_cache
from penstock.sync.membership import rank_of


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(4, 4), "y": torch.zeros(2)}, path)
    return path


WRONG: dict[str, Callable[[Path], object]] = {
    "a uri of None": lambda file: ps.load(None),
    "a list with None": lambda file: ps.load([None]),
    "bytes as a float": lambda file: ps.load(file, settings=ps.ReadSettings(memory_bytes=1.5e9)),
    "bytes as a bool": lambda file: ps.load(file, settings=ps.ReadSettings(memory_bytes=True)),
    "a tuple for a box": lambda file: ps.load(file, boxes={"x": (0, 2)}),
    "a function that gives a tuple": lambda file: ps.load(file, boxes=lambda name, shape: (0, 2)),
    "a list of boxes": lambda file: ps.load(file, boxes=[1]),
    "a number for names": lambda file: ps.load(file, names=3),
    "a list of numbers for names": lambda file: ps.load(file, names=[3]),
    "a list for storage options": lambda file: ps.load(file, settings=ps.ReadSettings(storage_options=[1])),
    "a number as a group": lambda file: ps.load(file, group=3),
    "a text for verify": lambda file: ps.load(file, verify="yes"),
    "a text for verify of a target": lambda file: ps.load_into({"x": torch.zeros(4, 4)}, file, verify="yes"),
    "no device": lambda file: ps.load(file, device=None),
    "a number as a target": lambda file: ps.load_into(3, file),
    "a target of numbers": lambda file: ps.load_into({"x": 3}, file),
    "numbers to publish": lambda file: ps.publisher("x", [1, 2]),
    "nothing to publish": lambda file: ps.publisher("x", None),
    "a number as a parameter": lambda file: ps.publisher("x", {"a": 1}),
    "a number as a sync's name": lambda file: ps.publisher(3, {"a": torch.zeros(2)}),
    "numbers to subscribe with": lambda file: ps.subscriber("x", [1, 2]),
    "a format as an operation": lambda file: ps.convert(file, file.parent / "out", operations=["cast:F16"]),
    "a number as an operation": lambda file: ps.convert(file, file.parent / "out", operations=[3]),
    "a number as operations": lambda file: ps.convert(file, file.parent / "out", operations=3),
    "a number as a format": lambda file: ps.convert(file, file.parent / "out", to=3),
    "a text as workers": lambda file: ps.convert(file, file.parent / "out", workers="2"),
    "a number as devices": lambda file: ps.convert(file, file.parent / "out", devices=3),
    "no destination": lambda file: ps.convert(file, None),
    "a fleet of no model": lambda file: ps.join(3),
    "a number as a hub": lambda file: ps.join("m", connection=3),
    "a name as a hub": lambda file: ps.cache.attach("m", connection="hub"),
    "a mapping as a connection": lambda file: ps.subscriber("x", {"a": torch.zeros(2)}, connection={"hub": None}),
    "a number as a keeper's hub": lambda file: ps.cache.WeightCache(connection=3),
    "a number as the hub to ask": lambda file: ps.hub.status(connection=3),
    "a wait below 0 s": lambda file: ps.join("m", timeout_s=-1),
    "a wait that is no number": lambda file: ps.join("m", timeout_s=float("nan")),
    "a text as a wait": lambda file: ps.join("m", timeout_s="5"),
    "a stall that never ends": lambda file: ps.join("m", connection=ps.ConnectionSettings(stall_s=float("nan"))),
    "a text as readers": lambda file: ps.join("m", max_readers="4"),
    "a float as a rate": lambda file: ps.join("m", max_bytes_per_s=1.5),
    "numbers as coordinates": lambda file: ps.join("m", variant=ps.Variant(parallel=3)),
    "a number as a dtype": lambda file: ps.Variant(dtype=3),
    "a list as a quantisation config": lambda file: ps.Variant(quantization=[8]),
    "a quantisation that is no JSON": lambda file: ps.Variant(quantization={"dtype": object()}),
    "a mapping as a variant": lambda file: ps.join("m", variant={"role": "draft"}),
    "a rank without a number of ranks": lambda file: ps.subscriber("x", {"a": torch.zeros(2)}, rank=0),
    "a rank above the number of ranks": lambda file: ps.subscriber("x", {"a": torch.zeros(2)}, rank=(2, 2)),
    "a rank of three numbers": lambda file: ps.publisher("x", {"a": torch.zeros(2)}, rank=(0, 1, 2)),
    "texts as a rank": lambda file: ps.publisher("x", {"a": torch.zeros(2)}, rank=("0", "1")),
    "a model of None": lambda file: ps.cache.attach(None),
    "a text as seconds to wait": lambda file: ps.cache.attach("m", timeout_s="x"),
    "a text as a configuration": lambda file: penstock_compile_cache.restore(file, engine="torch", config="x"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument_raises_config_error(case: str, file: Path) -> None:
    with pytest.raises(ps.ConfigError) as caught:
        WRONG[case](file)
    assert caught.value.hint or caught.value.message
    assert not (file.parent / "out").exists()


def test_omitted_sync_rank_means_single_rank() -> None:
    assert rank_of(None) == (0, 1)
    assert rank_of((3, 8)) == (3, 8)


def test_format_passed_as_operation_raises_with_hint(file: Path) -> None:
    with pytest.raises(ps.ConfigError, match=r"is a format, not an operation; .*use to='cast:F16'"):
        ps.convert(file, file.parent / "out", operations=["cast:F16"])


@pytest.mark.parametrize(
    "operations", ["dequantise", ["dequantise:to=BF16"], {"op": "dequantise"}, ('{"op": "copy"}',)]
)
def test_operations_accept_strings_and_mappings(operations: object, file: Path) -> None:
    report = ps.convert(file, file.parent / "out", operations=operations, devices="cpu", workers=1)
    assert report.operation.startswith(("dequantise to BF16", "copy"))


def test_former_timeout_argument_name_is_deprecated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path))
    with pytest.warns(DeprecationWarning, match="wait_s= is called timeout_s= now"), pytest.raises(ps.NotFound):
        ps.cache.attach("nobody", wait_s=0.0)  # type: ignore[call-arg]
    with pytest.raises(ps.ConfigError, match="timeout_s"), ps.join("m") as fleet:
        fleet.fetch({}, timeout_s=-1)
