"""SGLang's release and resume of memory: weights that are read again, verified, before a scheduler takes a request.

In: SGLang's plugin calls `register`, and loads a model; a scheduler releases memory, and resumes it. Out: the model's
weights: those that SGLang kept itself, those that were sent meanwhile, or those of its path.
Not here: reading (`plugin`); receiving versions of a trainer.

    load_model                  meanwhile, the kernels are made ready that digest the weights on the device
    release_memory_occupation   digests of all weights
    resume_memory_occupation    by the last call: the same digests, or an update that was made since, or the path is
                                read again: the start's, or that of the last update

Written for SGLang 0.5.23. SGLang need not be installed to import this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from penstock.errors import PenstockError, SourceUnavailable
from penstock.spi import Log, kernels_ready

if TYPE_CHECKING:
    import torch

    from penstock.spi import MemoryDigests

_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_UPDATES = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
_WEIGHTS = "weights"


class SchedulerSleep:
    """The weights of one scheduler process while their memory is released.

    Attributes:
        is_whole: whether the model may be used.

    Args:
        load_format: of weights that Penstock loads; other schedulers are left alone.
    """

    def __init__(self, load_format: str) -> None:
        self._load_format = load_format
        self.is_whole = True
        self._digests: MemoryDigests | None = None

    def register(self) -> None:
        """Register the hooks with SGLang."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        hooks: Iterable[tuple[str, Callable[..., Any]]] = (
            ("release_memory_occupation", self.release),
            ("resume_memory_occupation", self.resume),
            *((name, self.update) for name in _UPDATES),
        )
        for name, hook in hooks:
            HookRegistry.register(f"{_MANAGER}.{name}", hook, HookType.AROUND)

    def release(self, original: Callable[..., Any], manager: Any, request: Any) -> Any:
        """Release memory, after the weights in it were digested."""
        if self._applies() and _has_weights(request.tags) and _WEIGHTS not in manager.offload_tags:
            from penstock.spi import MemoryDigests

            # Whether SGLang keeps the bytes (a backup on the host, no memory saver) shows when they are back.
            self._digests = MemoryDigests(
                tensor
                for _, runner in manager._select_runners()
                for tensor in (*runner.model.parameters(), *runner.model.buffers())
            )
            self.is_whole = False
        return original(manager, request)

    def resume(self, original: Callable[..., Any], manager: Any, request: Any) -> Any:
        """Resume memory; when no memory is released any more, bring the weights back.

        Raises:
            PenstockError: they could not be read. SGLang's answer has no field for a failure: the scheduler ends.
        """
        reply = original(manager, request)
        # Not before the last tag: a trainer sends its weights between the tags.
        if not self.is_whole and not manager.offload_tags:
            if self._digests is None or not self._digests.is_same():
                self._read_again(manager)
            self._whole()
        return reply

    def update(self, original: Callable[..., Any], manager: Any, request: Any) -> Any:
        """Update the weights."""
        reply = original(manager, request)
        if getattr(reply, "success", False) and _WEIGHTS not in manager.offload_tags:
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
        from sglang.srt.runtime_context import get_model

        return bool(get_model().load_format == self._load_format)


def loading(device: torch.device, log: Log) -> AbstractContextManager[None]:
    """Return a block in which a model is loaded; where its memory may be released, digests are ready afterwards.

    Args:
        device, log: as `kernels_ready`.
    """
    from sglang.srt.runtime_context import get_exec

    return kernels_ready(device, log) if get_exec().features.enable_memory_saver else nullcontext()


def _has_weights(tags: list[str] | None) -> bool:
    """Return whether these tags of a request name the weights; no tag names all."""
    return not tags or _WEIGHTS in tags


@contextmanager
def _as_error(role: str, path: str) -> Iterator[None]:
    """Add to an error which weights were to be read again."""
    try:
        yield
    except PenstockError as error:
        error.add_note(f"while the {role} model's weights were read again from {path}, after its memory was resumed")
        raise
