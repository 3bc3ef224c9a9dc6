"""A CPU platform for verl, which has CUDA, ROCm and NPU. verl imports it through `VERL_USE_EXTERNAL_MODULES`.

Ray is told that there are as many GPUs as verl starts workers (`ray_init.num_gpus`), because verl places workers on
GPUs. No GPU is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, set_platform

# Functions that verl expects in a device's module, and that `torch.cpu` lacks.
_MODULE = SimpleNamespace(
    **{name: getattr(torch.cpu, name) for name in ("is_available", "synchronize", "current_device", "device_count")},
    empty_cache=lambda: None,
    ipc_collect=lambda: None,
    reset_peak_memory_stats=lambda: None,
    memory_allocated=lambda: 0,
    memory_reserved=lambda: 0,
    max_memory_allocated=lambda: 0,
    max_memory_reserved=lambda: 0,
    mem_get_info=lambda: (0, 0),
    set_device=lambda device: None,
    get_device_name=lambda: "CPU",
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """The host's processor, without streams and device memory, and with gloo."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module: ModuleType = _MODULE  # type: ignore[assignment]

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        # verl passes it to `Tensor.to`, where a number means an accelerator.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


set_platform(PlatformCPU())
