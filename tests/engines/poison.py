"""A vLLM worker extension that destroys the weights, as a sleep of level 2 does on a GPU.

vLLM's CPU workers ignore sleep, so a test destroys the weights itself. At level 2 buffers stay, because vLLM restores
them. On a GPU a test destroys the copies that vLLM makes in host memory.
"""

from __future__ import annotations

from typing import Any

import torch


class Poison:
    """Mixed into a worker with `--worker-extension-cls`."""

    def poison(self) -> int:
        """Destroy all weights, and return the number of tensors and packed layers."""
        count = 0
        for layer in self.model_runner.get_model().modules():  # type: ignore[attr-defined]
            for parameter in layer._parameters.values():
                if parameter is not None and parameter.numel():
                    parameter.data.copy_(torch.randn_like(parameter.float()).to(parameter.dtype))
                    count += 1
            # The CPU backend keeps the weights of linear layers packed and inaccessible, so scale them instead.
            if (linear := vars(layer).get("cpu_linear")) is not None:
                layer.cpu_linear = _scaled(linear)
                count += 1
        return count

    def poison_buffers(self) -> int:
        """Destroy all buffers, as a damaged copy in host memory does at level 1. Return the number of buffers."""
        count = 0
        for buffer in self.model_runner.get_model().buffers():  # type: ignore[attr-defined]
            if buffer.numel() and buffer.is_floating_point():
                buffer.copy_(torch.randn_like(buffer.float()).to(buffer.dtype))
                count += 1
        return count

    def poison_backups(self) -> int:
        """Destroy the weights that vLLM's allocator copied to the host, and return the number of copies.

        At level 2 vLLM 0.33 still copies what it tags `runtime` and `cudagraph`.
        """
        from vllm.device_allocator.cumem import CuMemAllocator

        allocated = [one for one in CuMemAllocator.get_instance().pointer_to_data.values() if one.tag == "weights"]
        backups = [one.cpu_backup_tensor for one in allocated if one.cpu_backup_tensor is not None]
        for backup in backups:
            backup.random_()
        return len(backups)

    def staging_versions(self) -> int:
        """Return the version in the staging model."""
        subscriber, _ = self.weight_transfer_engine._joined  # type: ignore[attr-defined]
        version: int = subscriber.version
        return version


def _scaled(linear: Any) -> Any:
    return lambda x, weight, bias: linear(x, weight, bias) * -3.0 + 1.0
