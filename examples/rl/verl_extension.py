"""verl's methods of vLLM's workers, for vLLM's CPU build: only `--transfer naive` uses them.

By itself, because each worker of vLLM imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class Extension(vLLMColocateWorkerExtension):
    """verl's extension of a worker, which loads weights as vLLM's `reload_weights` does."""

    def _update_weights(self, weights: list[tuple[str, torch.Tensor]], **_: Any) -> None:
        # verl calls the model's own loader. vLLM's CPU build packs the weights of linear layers after the first load,
        # and that loader cannot be called again: `'Parameter' object has no attribute 'weight_loader'`.
        # Copies, because on a CPU these are views of verl's buffer, which it is about to free. The tiny model is one
        # bucket; a reload needs all tensors.
        copies = [(name, tensor.clone()) for name, tensor in weights]
        self.model_runner.reload_weights(weights_iterator=iter(copies))
