"""vLLM's models are filled from a recording of their own loaders, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5")

from tests.support.ports import free_ports  # noqa: E402
from tests.unit.sync.moved import assert_same  # noqa: E402 - after what it needs
from tests.unit.sync.small_models import CONFIGS, make, saved  # noqa: E402
from tests.unit.sync.toy import table_of  # noqa: E402

from penstock.sync.recording.layout import fill  # noqa: E402
from penstock.sync.recording.requirements import record  # noqa: E402

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def vllm_config() -> Iterator[Callable[[Any], Any]]:
    """Set up vLLM's distributed state for one rank, and yield a function that makes its configuration for a model."""
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

    (port,) = free_ports(1)
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
def test_recorded_load_matches_vllm_loader(
    which: str, tp_rank: int, tp: int, tmp_path: Any, vllm_config: Callable[[Any], Any], monkeypatch: Any
) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.distributed import get_tp_group
    from vllm.model_executor.model_loader.utils import initialize_model

    # This is one rank of several, running alone, because loading only asks the group for its numbers.
    monkeypatch.setattr(get_tp_group(), "world_size", tp)
    monkeypatch.setattr(get_tp_group(), "rank_in_group", tp_rank)
    tensors = saved(make(CONFIGS[which]()), tmp_path)

    def empty() -> Any:
        config = vllm_config(tmp_path)  # it keeps the layers of only one model by name
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
    # These are scales of a quantised KV cache, which vLLM sets itself if a checkpoint has none.
    assert all(name.endswith("_scale") for name in recording.unfilled)
    assert set(recording.unused) <= {"lm_head.weight"}
    kept = {record.target: record for record in recording.records if record.target.endswith("down_proj.weight")}
    assert all(one.source_box.shape[1] * tp == recording.shapes[one.source][1] for one in kept.values())
    fill(recording, tensors, live)
    true.load_weights(iter(tensors.items()))
    assert_same(live, true)
