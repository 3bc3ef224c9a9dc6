"""A user's own operations: functions of a tensor, classes, and what they must not give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.errors import ConfigError, OperationFailed, PlanError
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB
from penstock_convert.operations.formats import Dequantise
from penstock_convert.operations.operation import Chain, CopyOperation
from penstock_convert.operations.spec import code_of, function_of
from penstock_convert.request import plan
from penstock_convert.testing import check_rows, outputs_of

TENSORS = {
    "mlp.up": torch.randn(33, 9).bfloat16(),
    "attn.q": torch.randn(7),
    "scalar": torch.tensor(2.0),
    "steps": torch.tensor([4]),
    "none": torch.zeros(0, 3),
}


def halved(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return tensor / 2


def centred(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return tensor - tensor.float().mean().to(tensor.dtype) if tensor.numel() else tensor


def widened(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return tensor.float()


def other_halves(tensor: torch.Tensor, name: str) -> torch.Tensor:
    return tensor.half()


def nothing(tensor: torch.Tensor, name: str) -> None:
    tensor.clone()


halved.rows = True  # type: ignore[attr-defined]
halved.names = "mlp"  # type: ignore[attr-defined]


class Named:
    """Makes an operation of its options."""

    def __init__(self, wanted: str) -> None:
        self.wanted = wanted


class Scaled(CopyOperation):
    """An operation whose name does not say all that it was told."""

    name = "scaled"

    def __init__(self, by: int) -> None:
        pass


def here(name: str) -> str:
    return f"{__name__}:{name}"


def test_row_function_changes_only_selected_tensors():
    found = check_rows(function_of(here("halved")), TENSORS)
    assert torch.equal(found["mlp.up"], TENSORS["mlp.up"] / 2)
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS if name != "mlp.up")


def test_unsliced_function_receives_every_float_tensor():
    found = check_rows(function_of(here("centred")), TENSORS)
    assert torch.equal(found["mlp.up"], centred(TENSORS["mlp.up"], ""))
    assert torch.equal(found["scalar"], torch.tensor(0.0)) and torch.equal(found["steps"], TENSORS["steps"])


CODES = torch.ones(128, 128).to(torch.float8_e4m3fn)
STORED = {
    "scales beside codes": {"mlp.weight": CODES, "mlp.weight_scale_inv": torch.ones(1, 1)},
    "codes without scales": {"mlp.weight": CODES},
    "codes of an unknown format": {"mlp.qweight": torch.ones(8, 8, dtype=torch.int32), "mlp.scales": torch.ones(8, 8)},
    "scale without codes": {"mlp.weight_scale": torch.ones(1)},
}


@pytest.mark.parametrize("situation", STORED)
def test_function_on_quantised_tensor_requires_raw_option(situation, monkeypatch):
    given = STORED[situation] | {"norm.weight": torch.ones(4)}
    with pytest.raises(PlanError, match=r"put `dequantise` before.*halved.names.*halved.raw = True") as refused:
        outputs_of(function_of(here("halved")), given)
    assert refused.value.tensor in STORED[situation]
    monkeypatch.setattr(halved, "names", "norm")
    assert torch.equal(outputs_of(function_of(here("halved")), given)["norm.weight"], torch.ones(4) / 2)
    monkeypatch.setattr(halved, "names", "")
    monkeypatch.setattr(halved, "raw", True, raising=False)
    found = outputs_of(function_of(here("halved")), given)
    for name, tensor in given.items():
        is_float = tensor.dtype is torch.float32
        assert torch.equal(found[name].float(), tensor.float() / 2 if is_float else tensor.float()), name


def test_function_after_dequantise_receives_float_values():
    given = STORED["scales beside codes"] | {"norm.weight": torch.ones(4)}
    found = outputs_of(Chain(Dequantise("F32"), function_of(here("halved"))), given)
    assert found.keys() == {"mlp.weight", "norm.weight"} and torch.equal(found["mlp.weight"], CODES.float() / 2)


@pytest.mark.parametrize(
    ("name", "said"),
    [("widened", "returned torch.float32"), ("other_halves", "returned torch.float16"), ("nothing", "NoneType")],
)
def test_undeclared_function_output_is_refused(name, said):
    with pytest.raises(OperationFailed, match=said) as caught:
        outputs_of(function_of(here(name)), TENSORS)
    assert caught.value.tensor in TENSORS and not caught.value.mutated


def test_invalid_user_function_raises_config_error():
    for where, said in (
        ("no.such.module:f", "No module named"),
        (here("absent"), "has no attribute .absent."),
        (here("TENSORS"), "neither"),
    ):
        with pytest.raises(ConfigError, match=said):
            function_of(where)
    with pytest.raises(ConfigError, match="neither"):
        function_of(here("halved"), factor=2)
    with pytest.raises(ConfigError, match="neither"):
        function_of(here("Named"), wanted="x")


def test_edited_function_source_changes_its_digest(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "of_the_user.py"
    file.write_text("def same(tensor, name):\n    return tensor\n")
    first = function_of("of_the_user:same")
    codes = [code_of(first), code_of(Chain(first, CopyOperation())), code_of(CopyOperation())]
    assert codes[0] == codes[1] != codes[2] == ""
    file.write_text("def same(tensor, name):\n    return tensor * 1\n")
    assert code_of(first) != codes[0]


def test_edited_function_inside_partial_changes_digest(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "partly.py"
    told = (
        "import functools\n\ndef of(tensor, name, by):\n    return tensor {} by\n\nsame = functools.partial(of, by=1)\n"
    )
    file.write_text(told.format("*"))
    found = function_of("partly:same")
    before = code_of(found)
    file.write_text(told.format("/"))
    assert code_of(found) != before


def test_function_options_change_job_key(tmp_path: Path) -> None:
    write_llama(tmp_path / "made", total_bytes=MIB)
    words = [{"op": "function", "function": here("Scaled"), "by": by} for by in (2, 3, 3)]
    keys = [plan(tmp_path / "made", operations=[word]).key for word in words]
    assert keys[0] != keys[1] == keys[2]


@pytest.mark.parametrize("by", [Path("x"), 1 << 100, "\ud800"])
def test_unserialisable_options_are_refused(by: object, tmp_path: Path) -> None:
    write_llama(tmp_path / "made", total_bytes=MIB)
    with pytest.raises(ConfigError, match="cannot be sent to workers"):
        plan(tmp_path / "made", operations=[{"op": "function", "function": here("Scaled"), "by": by}])
