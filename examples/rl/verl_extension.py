"""verl's extension for vLLM's workers, for vLLM's CPU build. Only `--transfer naive` uses it.

It is a separate module, because each worker of vLLM imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class Extension(vLLMColocateWorkerExtension):
    """verl's extension for a worker, which loads weights with vLLM's `reload_weights`."""

    def _update_weights(self, weights: list[tuple[str, torch.Tensor]], **_: Any) -> None:
        # verl calls the model's own loader. vLLM's CPU build packs the weights of linear layers after the first load,
        # and then that loader cannot be called again: `'Parameter' object has no attribute 'weight_loader'`.
        # Copy the tensors, because on a CPU they are views of verl's buffer, which verl is about to free. The tiny
        # model is one bucket, and a reload needs all tensors.
        copies = [(name, tensor.clone()) for name, tensor in weights]
        self.model_runner.reload_weights(weights_iterator=iter(copies))
