"""Formats against `transform.quantize` on whole tensors; the same bits however rows are cut; back again."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import ConfigError, PlanError
from penstock.jobs.formats import Dequantise, Store
from penstock.jobs.operation import Chain, Rename
from penstock.testing.operations import check_rows, made, table_of
from penstock.testing.transform_suite import values
from penstock.transform.geometry import FORMATS, fault, format_of
from penstock.transform.quantize import dequantise, dtype_of, quantise
from penstock.types import DType

BLOCKS = [tag for tag, form in FORMATS.items() if form.scaling != "none"]
CASTS = [tag for tag, form in FORMATS.items() if form.scaling == "none"]
SHAPES = [(128, 128), (300, 416), (129, 32), (1, 64), (0, 32), (5, 0), (513, 1056)]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def weights(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    found = {f"l{i}.weight": values(shape, dtype, i) for i, shape in enumerate(SHAPES)}
    return {**found, "l.norm.weight": torch.ones(64), "l.bias": torch.ones(3), "steps": torch.tensor(3)}


@pytest.mark.parametrize("tag", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_format_is_what_the_whole_tensor_gives(tag, dtype):
    given, form = weights(dtype), format_of(tag)
    found = check_rows(Store(tag), given)
    for name, tensor in given.items():
        if name.startswith(("l.", "steps")) or fault(form, dtype_of(tensor), tuple(tensor.shape)):
            assert torch.equal(raw(found.pop(name)), raw(tensor)), name
            continue
        wanted = quantise(form, tensor)
        suffixes = (form.values_suffix, form.scales_suffix, form.global_suffix)
        for suffix, part in zip(suffixes, wanted, strict=False):
            got = found.pop(name + suffix)
            assert got.shape == part.shape and got.dtype == part.dtype, name + suffix
            assert torch.equal(raw(got), raw(part)), name + suffix
    assert not found


@pytest.mark.parametrize("tag", CASTS)
def test_a_cast_takes_every_tensor_that_floats(tag):
    form = format_of(tag)
    given = {**weights(), "stack": values((3, 5, 7), torch.float32, 1), "scalar": torch.tensor(1.5)}
    found = check_rows(Store(tag), given)
    for name, tensor in given.items():
        is_cast = tensor.is_floating_point() and dtype_of(tensor) is not form.values
        wanted = quantise(form, tensor)[0] if is_cast else tensor
        assert found[name].dtype == wanted.dtype and torch.equal(raw(found[name]), raw(wanted)), name


def test_experts_in_a_stack_have_blocks_of_their_own():
    given = {"experts.weight": values((5, 130, 200), torch.bfloat16, 2), "w.weight": torch.ones(4, 4)}
    form = format_of("fp8-block128")
    recipes = {recipe.outputs[0].spec.name: recipe for recipe in Store("fp8-block128").recipes([table_of(given)])}
    assert len(recipes["experts.weight"].outputs) == 1  # chosen are linear weights, of two dims
    store = Store("fp8-block128")
    spec = recipes["experts.weight"].inputs[0].spec
    recipe = store._recipe(spec)
    wanted = quantise(form, given["experts.weight"])
    found = [store.run(recipe, a, b, [given["experts.weight"][a:b]]) for a, b in ((0, 2), (2, 5))]
    for i, part in enumerate(wanted):
        assert torch.equal(raw(torch.cat([one[i] for one in found])), raw(part))
        assert recipe.outputs[i].byte_range(0, 2)[1] == found[0][i].nbytes


def test_only_and_keep_are_patterns_of_whole_names():
    given = {"a.weight": torch.ones(64, 64), "b.weight": torch.ones(64, 64), "c.table": torch.ones(64, 64)}
    assert "a.weight_scale" in made(Store("mxfp8", keep=("b.*",)), given)
    assert made(Store("mxfp8", keep="b.*"), given).keys() == made(Store("mxfp8", keep=("b.*",)), given).keys()
    assert made(Store("mxfp8", only=("c.*",)), given).keys() == {*given, "c.table_scale"}
    assert made(Store("cast:BF16", only=("a.*",)), given)["b.weight"].dtype is torch.float32
    with pytest.raises(PlanError, match="no tensor is left"):
        Store("mxfp8", only=("d.*",)).recipes([table_of(given)])
    with pytest.raises(ConfigError, match="no transform is called"):
        Store("fp7")


@pytest.mark.parametrize("tag", BLOCKS)
@pytest.mark.parametrize("to", [DType.BF16, DType.F32])
def test_dequantising_knows_each_format(tag, to):
    given, form = weights(), format_of(tag)
    stored = made(Store(tag), given)
    found = check_rows(Dequantise(to), stored)
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        if name.startswith(("l.", "steps")) or fault(form, dtype_of(tensor), tuple(tensor.shape)):
            assert torch.equal(raw(found[name]), raw(tensor))
        else:
            assert torch.equal(raw(found[name]), raw(dequantise(form, quantise(form, tensor), to))), name


def test_what_looks_like_a_format_and_is_none_is_left_alone():
    codes = torch.zeros(256, 256).to(torch.float8_e4m3fn)
    given = {
        "plain": codes,
        "wrong.weight": codes,
        "wrong.weight_scale_inv": torch.ones(3, 2),
        "ints.weight": torch.zeros(256, 256, dtype=torch.int8),
        "ints.weight_scale": torch.ones(256, 1),
        "halves.weight": torch.ones(256, 256),
        "halves.weight_scale_inv": torch.ones(2, 2),
        "alone_packed": torch.zeros(256, 128, dtype=torch.uint8),
    }
    found = check_rows(Dequantise(), given)
    assert found.keys() == given.keys()
    assert all(torch.equal(raw(found[name]), raw(tensor)) for name, tensor in given.items())


def test_a_model_that_is_stored_another_way_in_one_reading():
    given = {"a.weight": values((260, 300), torch.bfloat16, 4)}
    stored = made(Store("fp8-block128"), given)
    chain = Chain(Dequantise("F32"), Chain(Rename(((r"^a", "b"),)), Store("fp8-channel")))
    found = check_rows(chain, stored)
    form = format_of("fp8-block128")
    wanted = quantise(format_of("fp8-channel"), dequantise(form, quantise(form, given["a.weight"]), DType.F32))
    assert torch.equal(raw(found["b.weight"]), raw(wanted[0]))
    assert torch.equal(raw(found["b.weight_scale"]), raw(wanted[1]))


def test_the_configuration_says_what_is_in_the_files():
    given = [table_of({"a.weight": torch.ones(128, 128), "lm_head.weight": torch.ones(8, 8)})]
    store = Store("fp8-block128")
    store.recipes(given)
    said = store.config({"x": 1, "torch_dtype": "bfloat16"})
    assert said["quantization_config"]["quant_method"] == "fp8" and said["x"] == 1
    assert said["quantization_config"]["modules_to_not_convert"] == ["lm_head"]
    assert Dequantise("F16").config(said) == {"x": 1, "torch_dtype": "float16"}
    cast = Store("cast:F32")
    cast.recipes(given)
    assert cast.config({"dtype": "bfloat16"}) == {"dtype": "float32"}  # as transformers 5 calls it
    with pytest.raises(ConfigError, match="not a dtype"):
        Dequantise("F8_E4M3")
