"""Merges against the formulas of their papers, on whole tensors in plain torch; the same bits however rows are cut."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, PlanError
from penstock_convert.operations.lora import LoraMerge
from penstock_convert.operations.merge import Linear, Slerp, Ties
from penstock_convert.operations.operation import StreamedOperation
from penstock_convert.operations.spec import operation_of
from penstock_convert.testing import check_rows, outputs_of, table_of

SHAPES = {
    "a": (37, 70),
    "stack": (5, 6, 7),
    "flat": (300,),
    "scalar": (),
    "none": (0, 8),
    "thin": (3, 0),
    "one": (1, 1),
}
LONG = {"w": (300, 1000)}  # several blocks of the walk


def sources(
    count: int, dtype: torch.dtype = torch.bfloat16, **shapes: tuple[int, ...]
) -> list[dict[str, torch.Tensor]]:
    chance = torch.Generator().manual_seed(7)
    return [
        {
            **{name: torch.randn(shape, generator=chance).to(dtype) for name, shape in (shapes or SHAPES).items()},
            "steps": torch.tensor([i, 1, 2]),
        }
        for i in range(count)
    ]


def are_equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(found, wanted)


@settings(deadline=None, max_examples=30)
@given(
    weights=st.lists(st.floats(-2, 2, width=32), min_size=2, max_size=4),
    normalize=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
)
def test_weighted_sum_accumulates_in_fp32(weights, normalize, dtype):
    if normalize and not sum(weights):
        return
    given_ = sources(len(weights), dtype)
    found = check_rows(Linear(tuple(weights), normalize), *given_)
    share = [weight / (sum(weights) if normalize else 1.0) for weight in weights]
    for name in SHAPES:
        total = given_[0][name].float() * share[0]
        for tensors, weight in zip(given_[1:], share[1:], strict=True):
            total = total + tensors[name].float() * weight
        assert are_equal(found[name], total.to(dtype)), name
    assert are_equal(found["steps"], given_[0]["steps"])  # what does not float is the first source's


def test_merge_without_weights_option_averages_sources():
    given_ = sources(3, torch.float32, **LONG)
    wanted = sum(one["w"].double() for one in given_) / 3
    assert torch.allclose(check_rows(Linear(), *given_)["w"].double(), wanted, atol=1e-6)


def test_merge_output_has_first_source_dtype():
    a, b = sources(1)[0], sources(1, torch.float32)[0]
    found = check_rows(Linear((1.0, 1.0)), a, b)
    assert are_equal(found["a"], (a["a"].float() * 0.5 + b["a"] * 0.5).to(torch.bfloat16))


@pytest.mark.parametrize("t", [0.0, 0.3, 1.0])
def test_slerp_matches_shoemake_formula(t):
    given_ = sources(2, torch.float32, **SHAPES, **LONG)
    found = outputs_of(Slerp(t), *given_)
    for name in ("a", "stack", "flat", "w"):
        a, b = (one[name].double() for one in given_)
        angle = torch.acos((a * b).sum() / a.norm() / b.norm())
        wanted = (torch.sin((1 - t) * angle) * a + torch.sin(t * angle) * b) / torch.sin(angle)
        assert torch.allclose(found[name].double(), wanted, atol=1e-6), name
    assert found["none"].shape == (0, 8) and found["scalar"].shape == ()


def test_slerp_of_parallel_tensors_is_linear():
    a = torch.randn(64, 8)
    for b in (a * 3, -a, torch.zeros_like(a)):
        wanted = a * 0.75 + b * 0.25
        assert torch.allclose(outputs_of(Slerp(0.25), {"w": a}, {"w": b})["w"], wanted, atol=1e-6)


def test_slerp_matches_mergekit():
    a, b, t = torch.randn(400), torch.randn(400), 0.4
    u, v = a / a.norm(), b / b.norm()
    start = torch.arccos((u * v).sum())
    wanted = torch.sin(start - start * t) / torch.sin(start) * a + torch.sin(start * t) / torch.sin(start) * b
    assert torch.allclose(outputs_of(Slerp(t), {"w": a}, {"w": b})["w"], wanted, atol=1e-5)


def ties(base: torch.Tensor, models: list[torch.Tensor], density: float, weights: list[float], scale: float):
    """Section 3 of the paper, element by element, with a weight for each model."""
    moves = []
    for model, weight in zip(models, weights, strict=True):
        change = (model.float() - base.float()).reshape(-1)
        kept = max(1, int(density * change.numel()))
        edge = change.abs().sort(descending=True).values[kept - 1]
        moves.append((torch.where(change.abs() >= edge, change, 0.0) * weight).tolist())
    merged = []
    for column in zip(*moves, strict=True):
        vote = math.copysign(1, sum(column)) if sum(column) else 0
        agree = [(move, weight) for move, weight in zip(column, weights, strict=True) if move * vote > 0]
        share = sum(weight for _, weight in agree)
        merged.append(sum(move for move, _ in agree) / (share or 1.0) if agree else 0.0)
    return base.double() + scale * torch.tensor(merged, dtype=torch.float64).reshape(base.shape)


@settings(deadline=None, max_examples=25)
@given(
    density=st.sampled_from([0.01, 0.2, 0.5, 0.999, 1.0]),
    weights=st.lists(st.sampled_from([1.0, 0.5, 2.0, -1.0]), min_size=1, max_size=4),
    scale=st.sampled_from([1.0, 0.4]),
    shape=st.sampled_from([(40, 23), (7, 5, 3), (100,), (1,)]),
    coarse=st.booleans(),
)
def test_ties_merge_matches_reference_implementation(density, weights, scale, shape, coarse):
    chance = torch.Generator().manual_seed(3)
    base, *models = (torch.randn(shape, generator=chance) for _ in range(1 + len(weights)))
    if coarse:  # many changes of one size, many votes that end in a tie
        base, *models = (one.round() for one in (base, *models))
    found = outputs_of(Ties(density, tuple(weights), scale), {"w": base}, *({"w": model} for model in models))["w"]
    assert torch.allclose(found.double(), ties(base, models, density, weights, scale), atol=1e-5)


def test_ties_merge_of_long_tensors_matches_reference():
    given_ = sources(3, torch.bfloat16, **LONG)
    found = outputs_of(Ties(0.1), *given_)["w"]
    base, *models = (one["w"] for one in given_)
    wanted = ties(base, models, 0.1, [1.0, 1.0], 1.0).to(torch.bfloat16)
    assert torch.allclose(found.float(), wanted.float(), rtol=2**-7)
    assert 0.8 < (found == base).float().mean() < 0.9  # two tenths of the changes, now and then at one place


def test_merge_preserves_nan():
    base, model = torch.zeros(10), torch.arange(10.0)
    model[3] = math.nan
    for operation in (Ties(0.2), Linear(), Slerp(0.5)):
        assert outputs_of(operation, {"w": base}, {"w": model})["w"][3].isnan(), operation.name


def test_mismatched_sources_error_lists_differences():
    a, b = sources(2)
    del b["a"]
    b["more"] = torch.zeros(1)
    b["flat"] = torch.zeros(299)
    with pytest.raises(PlanError) as caught:
        Linear().recipes([table_of(a), table_of(b)])
    for said in ("source 1", "1 missing (a)", "1 additional (more)", "1 with a different shape (flat)"):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("operation", "count"),
    [(Linear((1.0, 2.0)), 3), (Linear(), 1), (Slerp(0.5), 3), (Ties(0.5), 1), (Ties(0.5, (1.0,)), 3)],
)
def test_wrong_number_of_sources_is_refused(operation, count):
    with pytest.raises(PlanError):
        operation.recipes([table_of(one) for one in sources(count)])


def test_invalid_merge_settings_are_rejected():
    with pytest.raises(ConfigError, match="density"):
        Ties(0.0)
    with pytest.raises(PlanError, match="sum is zero"):
        Linear((1.0, -1.0)).recipes([table_of(one) for one in sources(2)])


def test_slicing_does_not_change_merge_and_store_results():
    tensors = [{"model.layers.0.mlp.up_proj.weight": torch.randn(700, 500), "b": torch.randn(7)} for _ in range(3)]
    for words in ({"op": "store", "format": "fp8-block128"}, {"op": "store", "format": "cast:BF16"}):
        chained = operation_of([{"op": "ties", "density": 0.4}, words])
        recipe = chained.recipes([table_of(one) for one in tensors])[0]
        assert isinstance(chained, StreamedOperation) and chained.part_unit(recipe) == 1 << 18
        check_rows(chained, *tensors, seeds=range(1))


# -- adapters


def adapter(rank: int, rows: int, columns: int, module: str) -> dict[str, torch.Tensor]:
    return {
        f"base_model.model.{module}.lora_A.weight": torch.randn(rank, columns),
        f"base_model.model.{module}.lora_B.weight": torch.randn(rows, rank),
    }


BASE = {
    "model.layers.0.q_proj.weight": torch.randn(600, 64).bfloat16(),
    "model.layers.0.k_proj.weight": torch.randn(128, 64).bfloat16(),
    "model.norm.weight": torch.randn(64).bfloat16(),
}


@pytest.mark.parametrize("rslora", [False, True])
def test_adapter_is_merged_with_peft_scale(rslora):
    given_ = adapter(8, 600, 64, "model.layers.0.q_proj") | adapter(4, 128, 64, "model.layers.0.k_proj")
    told = {"r": 8, "lora_alpha": 16, "use_rslora": rslora, "alpha_pattern": {"layers.0.k_proj": 3}}
    found = check_rows(LoraMerge(told), BASE, given_)
    for module, alpha, rank in (("q_proj", 16, 8), ("k_proj", 3, 4)):
        name = f"model.layers.0.{module}"
        a, b = (given_[f"base_model.model.{name}.lora_{side}.weight"].double() for side in "AB")
        wanted = BASE[f"{name}.weight"].double() + alpha / (rank**0.5 if rslora else rank) * (b @ a)
        assert torch.allclose(found[f"{name}.weight"].double(), wanted, rtol=2**-7, atol=1e-2)
    assert are_equal(found["model.norm.weight"], BASE["model.norm.weight"])


def test_transposed_adapter_weights_are_merged():
    base = {"h.0.c_attn.weight": torch.randn(64, 700)}
    given_ = adapter(8, 700, 64, "h.0.c_attn")
    found = check_rows(LoraMerge({"lora_alpha": 8, "fan_in_fan_out": True}), base, given_)["h.0.c_attn.weight"]
    a, b = given_.values()
    assert torch.allclose(found, base["h.0.c_attn.weight"] + (b @ a).T, atol=1e-4)


def test_embedding_adapter_and_saved_modules_are_merged():
    base = {
        "embed.weight": torch.randn(500, 32).bfloat16(),
        "head.weight": torch.randn(9, 32),
        "q.bias": torch.zeros(4),
    }
    given_ = {
        "base_model.model.embed.lora_embedding_A": torch.randn(4, 500),
        "base_model.model.embed.lora_embedding_B": torch.randn(32, 4),
        "base_model.model.head.weight": torch.randn(9, 32),
        "base_model.model.q.bias": torch.ones(4),
    }
    found = check_rows(LoraMerge({"r": 4, "lora_alpha": 2}), base, given_)
    a, b = list(given_.values())[:2]
    assert torch.allclose(
        found["embed.weight"].float(), base["embed.weight"].float() + 0.5 * (b @ a).T, rtol=2**-6, atol=0.02
    )
    assert are_equal(found["head.weight"], given_["base_model.model.head.weight"])
    assert are_equal(found["q.bias"], given_["base_model.model.q.bias"])


@pytest.mark.parametrize(
    "told",
    [{"peft_type": "IA3"}, {"use_dora": True}, {"init_lora_weights": "pissa_niter_4"}, {"init_lora_weights": "olora"}],
)
def test_unsupported_adapter_configuration_is_refused(told):
    with pytest.raises(ConfigError, match="lora-merge"):
        LoraMerge(told)


def test_adapter_not_matching_base_is_refused():
    tables = [table_of(BASE), table_of(adapter(8, 600, 64, "model.layers.9.q_proj"))]
    with pytest.raises(PlanError, match="2 adapter tensors match no tensor in the base"):
        LoraMerge({}).recipes(tables)
    with pytest.raises(PlanError, match="do not fit"):
        LoraMerge({}).recipes([table_of(BASE), table_of(adapter(8, 600, 65, "model.layers.0.q_proj"))])
    biased = {**adapter(8, 600, 64, "model.layers.0.q_proj")}
    name = next(name for name in biased if "lora_B" in name).replace(".weight", ".bias")
    with pytest.raises(PlanError, match=r"lora_bias\) for 1 layers without one: .*q_proj.bias") as caught:
        LoraMerge({}).recipes([table_of(BASE), table_of({**biased, name: torch.zeros(600)})])
    assert "without lora_bias" in str(caught.value.hint)
    packed = {"w.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn)}
    with pytest.raises(PlanError, match="cannot add an adapter to a F8_E4M3 tensor"):
        LoraMerge({}).recipes([table_of(packed), table_of(adapter(2, 8, 8, "w"))])
