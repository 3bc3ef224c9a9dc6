"""transformers models are trained with FSDP2 on several ranks, and synced into models that load themselves, exactly."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from tests.integration.sync.test_declare import EncodedRows, decoded, encoded  # noqa: E402 - imported after importorskip
from tests.support.ranks import run_ranks  # noqa: E402
from tests.unit.sync.moved import assert_same, move, spoil  # noqa: E402
from tests.unit.sync.small_models import CONFIGS, make, saved  # noqa: E402
from tests.unit.sync.toy import table_of  # noqa: E402

from penstock.sync.recording.requirements import record, wanted  # noqa: E402
from penstock.sync.shards import declared  # noqa: E402
from penstock_hf.transformers import checkpoint_shards, weights_loader  # noqa: E402

pytestmark = pytest.mark.engines


def _train(rank: int, world_size: int, directory: str) -> dict[str, tuple[EncodedRows, dict[str, Any]]]:
    return {which: _step(Path(directory) / which) for which in CONFIGS}


def _step(directory: Path) -> tuple[EncodedRows, dict[str, Any]]:
    """Run one optimiser step of a model sharded by layers. Return this rank's declaration and the whole model."""
    from torch.distributed.fsdp import fully_shard

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.arange(24).reshape(2, 12) % 96
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    rows = declared(checkpoint_shards(model, str(directory)))
    full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in model.state_dict().items()}
    return encoded(rows), {name: tensor.numpy() for name, tensor in full.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: Any) -> tuple[Path, list[dict[str, tuple[EncodedRows, dict[str, Any]]]]]:
    directory = tmp_path_factory.mktemp("models")
    for which, config in CONFIGS.items():
        saved(make(config()), directory / which)
    outcomes = run_ranks(_train, 3, str(directory), timeout_s=300)
    assert [(one.ended, one.value if one.ended == "raised" else "") for one in outcomes] == [("returned", "")] * 3
    return directory, [one.value for one in outcomes]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("which", CONFIGS)
def test_receiver_matches_checkpoint_saved_after_training_step(
    which: str, dtype: str, trained: Any, tmp_path: Path
) -> None:
    directory, ranks = trained
    before = transformers.AutoModelForCausalLM.from_pretrained(directory / which, dtype=torch.float32)
    stepped = make(CONFIGS[which]())
    stepped.load_state_dict({name: torch.from_numpy(values) for name, values in ranks[0][which][1].items()})
    tensors = saved(stepped, tmp_path)
    true = type(stepped).from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    model = type(stepped).from_pretrained(directory / which, dtype=getattr(torch, dtype))
    table = table_of(tensors)
    want = wanted(model, record(model, table, load=weights_loader(model)), table, load=weights_loader(model))
    spoil(model.parameters())
    move([decoded(rank[which][0]) for rank in ranks], [want.rows])
    want.install()
    want.finish()
    assert_same(model, true)
    assert not want.unrecorded
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), stepped.parameters(), strict=True))
