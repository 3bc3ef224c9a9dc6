"""verl's server adapter for vLLM, whose workers receive the trainer's versions by themselves.

In: the rollout worker's checkpoint engine says which version (`verl`). Out: vLLM's workers have received their parts,
verified them and installed them (`weight_transfer`); requests see one version or the other.
Not here: full tensors, which go verl's own way.

    init_weight_transfer_engine   once: each worker of vLLM subscribes
    start_weight_update, update_weights, finish_weight_update   for each version

Imports vLLM by verl's adapter: only verl's registry of adapters imports this module.
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout import ServerAdapter

from penstock_rl.verl import WIRE_FORMAT


class PenstockServerAdapter(ServerAdapter):  # type: ignore[misc]
    """verl's adapter of one rollout worker. The worker with the server has all workers of vLLM receive."""

    _init_info: dict[str, Any] | None = None

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **options: Any
    ) -> None:
        """Have the engine receive a version. Raises as vLLM's call of its workers, which all failed alike."""
        if wire_format != WIRE_FORMAT:
            await super().update_weights(weights, global_steps=global_steps, wire_format=wire_format, **options)
            return
        infos = {name: info async for name, info in weights}
        if not self._has_server:
            return
        if self._init_info != infos["init_info"]:
            await self._execute_method("init_weight_transfer_engine", kwargs={"init_info": infos["init_info"]})
            self._init_info = infos["init_info"]
        await self._execute_method("start_weight_update")
        await self._execute_method("update_weights", kwargs={"update_info": infos["update_info"]})
        await self._execute_method("finish_weight_update")
        # The cache has keys and values of the weights before.
        await self.server_handle.clear_kv_cache.remote()
        if global_steps is not None:
            await self.server_handle.set_global_steps.remote(global_steps)
