"""verl's server adapter for a vLLM engine whose workers receive the trainer's versions themselves.

The rollout worker's checkpoint engine (`verl`) yields the version to receive. Unsharded tensors still use verl's own
code path. The module imports vLLM through verl's adapter, so only verl's registry of adapters imports it.
"""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.vllm_rollout import ServerAdapter

from penstock_rl.verl import WIRE_FORMAT


class PenstockServerAdapter(ServerAdapter):  # type: ignore[misc]
    """verl's adapter for one rollout worker.

    The rollout worker that runs vLLM's server tells all of vLLM's workers to receive each new version.
    """

    _init_info: dict[str, Any] | None = None

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **options: Any
    ) -> None:
        """Make the engine receive a version.

        A failed update fails on all of vLLM's workers, and vLLM's error is raised.
        """
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
        # The cache still contains keys and values that were computed with the previous weights.
        await self.server_handle.clear_kv_cache.remote()
        if global_steps is not None:
            await self.server_handle.set_global_steps.remote(global_steps)
