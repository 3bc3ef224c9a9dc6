"""Verify SGLang's weights after their memory was released and resumed, and read them again if they were lost.

The weights are digested before their memory is released. After the last tag has resumed, the digests are compared. If
the weights differ and no update has replaced them, they are read again from the original path or the last update's
path. The scheduler accepts requests only after this check. Written for SGLang 0.5.23, and importable without SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError, SourceUnavailable
from penstock.spi import Log, kernels_ready
from penstock_sglang import runtime

if TYPE_CHECKING:
    import torch

    from penstock.spi import MemoryDigests

_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
_WEIGHTS = "weights"


class SchedulerSleep:
    """The state of a scheduler process's weights while the weights' memory is released.

    `is_whole` says whether the model may be used.

    The hooks change nothing in schedulers with a different `load_format`.
    """

    def __init__(self, load_format: str) -> None:
        self._load_format = load_format
        self.is_whole = True
        self._digests: MemoryDigests | None = None

    def register(self) -> None:
        """Register the hooks with SGLang.

        If this version of SGLang lacks a name that the hooks need, ImportError or AttributeError is raised, and no hook
        is registered.
        """
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        runtime.require()
        hooks: dict[str, Callable[..., Any]] = {
            "release_memory_occupation": self.release,
            "resume_memory_occupation": self.resume,
            **dict.fromkeys(_UPDATES, self.update),
        }
        for name in (*hooks, "_select_runners"):
            getattr(SchedulerWeightUpdaterManager, name)
        manager = f"{SchedulerWeightUpdaterManager.__module__}.{SchedulerWeightUpdaterManager.__qualname__}"
        for name, hook in hooks.items():
            HookRegistry.register(f"{manager}.{name}", hook, HookType.AROUND)

    def release(self, original: Callable[..., Any], manager: Any, request: Any, *arguments: Any, **named: Any) -> Any:
        """Digest the weights, then release their memory."""
        if self._applies() and _has_weights(request.tags) and _WEIGHTS not in manager.offload_tags:
            from penstock.spi import MemoryDigests

            # SGLang may preserve the bytes, with a backup on the host or because there is no memory saver. The digests
            # detect this case.
            self._digests = MemoryDigests(
                tensor
                for _, runner in manager._select_runners()
                for tensor in (*runner.model.parameters(), *runner.model.buffers())
            )
            self.is_whole = False
        return original(manager, request, *arguments, **named)

    def resume(self, original: Callable[..., Any], manager: Any, *arguments: Any, **named: Any) -> Any:
        """Resume memory. After the last released tag has resumed, restore the weights if they were lost.

        Raises PenstockError if lost weights could not be read again. SGLang's reply has no field for a failure, so the
        scheduler exits.
        """
        reply = original(manager, *arguments, **named)
        # Wait for the last tag, because a trainer may send its weights between two tags.
        if not self.is_whole and not manager.offload_tags:
            if self._digests is None or not self._digests.is_same():
                self._read_again(manager)
            self._whole()
        return reply

    def update(self, original: Callable[..., Any], manager: Any, *arguments: Any, **named: Any) -> Any:
        """Update the weights. After a successful update, lost weights need not be restored."""
        reply = original(manager, *arguments, **named)
        if not self.is_whole and getattr(reply, "success", False) and _WEIGHTS not in manager.offload_tags:
            self._whole()
        return reply

    def _read_again(self, manager: Any) -> None:
        for role, runner in manager._select_runners():
            path = runner.weight_updater.model_config.model_path
            with _as_error(role, path):
                is_done, message = runner.weight_updater.update_weights_from_disk(path, self._load_format)
                if not is_done:
                    raise SourceUnavailable(message, mutated=True)

    def _whole(self) -> None:
        self.is_whole = True
        self._digests = None

    def _applies(self) -> bool:
        return bool(runtime.load_format() == self._load_format)


def loading(device: torch.device, log: Log) -> AbstractContextManager[None]:
    """Return a context for loading a model.

    If SGLang may release the model's memory, the digest kernels are ready when the context exits.
    """
    return kernels_ready(device, log) if runtime.may_release() else nullcontext()


def _has_weights(tags: list[str] | None) -> bool:
    """Return whether the tags of a request include the weights. A request without tags includes all tags."""
    return not tags or _WEIGHTS in tags


@contextmanager
def _as_error(role: str, path: str) -> Iterator[None]:
    try:
        yield
    except PenstockError as error:
        error.add_note(f"while reading the {role} model's weights again from {path}, after its memory was resumed")
        raise
