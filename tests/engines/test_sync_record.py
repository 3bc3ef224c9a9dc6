"""Models of transformers and vLLM filled by what is recorded of their own loaders, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from penstock.fleet.line import tabulate  # noqa: E402 - after what it needs
from penstock.integrations.transformers import weights_loader  # noqa: E402
from penstock.loader.tensor import dtype_of  # noqa: E402
from penstock.sync.layout import fill  # noqa: E402
from penstock.sync.record import record  # noqa: E402

pytestmark = pytest.mark.engines

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SMALL),
    "tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **(SMALL | {"num_key_value_heads": 4}),
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_method="noaux_tc",  # vLLM has the correction bias for this one only
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
}


def make(config: Any) -> Any:
    return shuffled(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def shuffled(model: Any) -> Any:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(0, 0.3)
    return model


def saved(model: Any, directory: Any) -> dict[str, Any]:
    """The checkpoint as transformers writes it: experts apart."""
    from safetensors.torch import load_file

    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def table_of(tensors: dict[str, Any]) -> Any:
    values = tensors.values()
    return tabulate(list(tensors), [dtype_of(t.dtype) for t in values], [tuple(t.shape) for t in values])


def assert_same(mine: Any, true: Any) -> None:
    for (name, a), (_, b) in zip(mine.state_dict().items(), true.state_dict().items(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("which", CONFIGS)
def test_transformers_own_loading(which: str, dtype: str, tmp_path: Any) -> None:
    made = make(CONFIGS[which]())
    tensors = saved(made, tmp_path)
    true = type(made).from_pretrained(tmp_path, dtype=getattr(torch, dtype))
    live = shuffled(copy.deepcopy(true))
    before = {name: (t.data_ptr(), t.clone()) for name, t in live.state_dict().items()}
    recording = record(live, table_of(tensors), load=weights_loader(live))
    for name, t in live.state_dict().items():
        assert t.data_ptr() == before[name][0]
        assert torch.equal(t, before[name][1]), name
    assert not recording.unrecorded
    assert not recording.unfilled
    assert not recording.unused
    fill(recording, tensors, live)
    assert_same(live, true)
    again = shuffled(copy.deepcopy(live))
    weights_loader(again)(iter(tensors.items()))
    assert_same(again, true)


@pytest.fixture(scope="module")
def vllm_config() -> Iterator[Callable[[Any], Any]]:
    """vLLM's distributed state for one rank, and a maker of its configuration for a model."""
    import socket
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("vllm")
        import vllm.model_executor.models.deepseek_v2  # noqa: F401 - it warns when it is imported
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, backend="gloo")
        initialize_model_parallel(1, 1)
    yield _config_of
    destroy_model_parallel()
    destroy_distributed_environment()


def _config_of(directory: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(directory), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64
    ).create_engine_config()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("tp_rank", "tp"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize("which", CONFIGS)
def test_vllms_own_loading(
    which: str, tp_rank: int, tp: int, tmp_path: Any, vllm_config: Callable[[Any], Any], monkeypatch: Any
) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import get_tp_group
    from vllm.model_executor.model_loader.utils import initialize_model

    # A rank of several, alone: loading asks the group for its numbers only.
    monkeypatch.setattr(get_tp_group(), "world_size", tp)
    monkeypatch.setattr(get_tp_group(), "rank_in_group", tp_rank)
    tensors = saved(make(CONFIGS[which]()), tmp_path)

    def empty() -> Any:
        config = vllm_config(tmp_path)  # it keeps the layers of one model by name
        config.parallel_config.tensor_parallel_size = tp
        with set_current_vllm_config(config), torch.device("cpu"):
            model = initialize_model(vllm_config=config)
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.data.fill_(0.5)
        return model

    live, true = empty(), empty()
    recording = record(live, table_of(tensors))
    assert all((tensor == 0.5).all() for tensor in live.parameters())
    assert not recording.unrecorded
    # Scales of a quantised KV cache, which vLLM sets itself where a checkpoint has none.
    assert all(name.endswith("_scale") for name in recording.unfilled)
    assert set(recording.unused) <= {"lm_head.weight"}
    kept = {record.target: record for record in recording.records if record.target.endswith("down_proj.weight")}
    assert all(one.source_box.shape[1] * tp == recording.shapes[one.source][1] for one in kept.values())
    fill(recording, tensors, live)
    true.load_weights(iter(tensors.items()))
    assert_same(live, true)
