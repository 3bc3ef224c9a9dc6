"""Make sure that a vLLM engine that wakes from sleep has verified weights before its first request.

Before a level-1 sleep the weights are digested, and the digests are compared after vLLM has copied the weights back
from the host. After a level-2 sleep, the newest version of the sync is received, or else the engine's original weights
are loaded. Until the weights are verified, `resume` is refused, and requests wait in vLLM's paused scheduler. A
`wake_up` that fails can be called again. `wake_up(tags=["weights"])` alone restores no weights, because a trainer may
send a version before the last tag wakes.

The module can be imported without vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.spi import Log, kernels_ready, log_named, patch_once
from penstock_vllm.patches import check_stores, is_sent_by, loads_by

if TYPE_CHECKING:
    import torch

NO_VERSION = "none"
"""Version that vLLM reports while it has no valid weights."""
_TAGS = frozenset({"weights", "kv_cache"})
"""Tags of memory that can sleep. Source: `SLEEP_TAGS` of vllm/v1/executor/abstract.py, vLLM 0.32."""


def protect_workers(worker: type[Any], backend: str) -> None:
    """If `backend` loads or sends the weights, make each worker restore them when it wakes."""

    # `report_phases` explains why the constructor is patched.
    def construct(original: Any, self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        applies = _applies(getattr(self, "vllm_config", None), backend)
        if applies and hasattr(self, "sleep") and hasattr(self, "wake_up"):
            WorkerSleep(self, is_sent=is_sent_by(self.vllm_config, backend)).attach()

    patch_once(worker, __init__=construct)


def protect_engine(core: type[Any], backend: str) -> None:
    """If an engine uses `backend`, make it report no version and serve no request while its weights are gone."""
    # Before vLLM 0.32 an engine reports no version of its weights, but its workers refuse to compute without weights.
    has_version = hasattr(core, "set_weight_version")

    check_stores(core, "vllm_config")

    def sleep(original: Any, self: Any, *arguments: Any, **named: Any) -> Any:
        done = original(self, *arguments, **named)
        level = arguments[0] if arguments else named.get("level", 1)
        if not has_version or not _applies(self.vllm_config, backend) or level < 1:
            return done

        def forget(_: object = None) -> None:
            if self._weight_version != NO_VERSION:
                self._penstock_version_before = self._weight_version
                self._weight_version = NO_VERSION

        if done is None:
            forget()
        else:
            # Until the engine sleeps, its responses to running requests state the current version.
            done.add_done_callback(forget)
        return done

    def resume(original: Any, self: Any, *arguments: Any, **named: Any) -> Any:
        if _applies(self.vllm_config, backend):
            asleep = self.model_executor.sleeping_tags
            if asleep:
                # Without this check, `/resume` alone would make the engine compute without weights or without a cache.
                raise RuntimeError(f"the engine is asleep ({', '.join(sorted(asleep))}): call /wake_up")
            if has_version and self._weight_version == NO_VERSION:
                self.set_weight_version(_version_after(self))
        return original(self, *arguments, **named)

    patch_once(core, sleep=sleep, resume_scheduler=resume)


def _version_after(core: Any) -> str:
    """Return the version of the weights after a wake, which is the previous version if they were restored."""
    versions = core.model_executor.collective_rpc("penstock_version_after_sleep")
    before: str = core._penstock_version_before
    return str(versions[0] or before)


def _applies(config: Any, backend: str) -> bool:
    return loads_by(config, backend) or is_sent_by(config, backend)


class WorkerSleep:
    """Protects one worker's weights across a sleep.

    Attributes:
        is_whole: whether the weights may be used.

    Args:
        worker: a worker of any platform.
        is_sent: whether Penstock sends a trainer's versions to this worker. If `is_sent` is False, other code may fill
            the weights between two calls of `wake_up`, so only a call that wakes all memory restores the weights.
    """

    def __init__(self, worker: Any, *, is_sent: bool) -> None:
        self._worker = worker
        self._is_sent = is_sent
        self.is_whole = True
        self._asleep: set[str] = set()
        # The highest level of the sleeps since the weights were last complete, or 0.
        self._level = 0
        self._digests: Any = None
        # Whether vLLM copied back the same bytes at level 1. The weights are awake then.
        self._is_intact = False
        # Whether no other code could fill the weights between two calls of `wake_up`.
        self._is_at_once = True
        # Tensors that no version fills, each with a copy of its value.
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._num_installed = 0
        # The version of the weights that sleep, empty if it is the version before the first sleep.
        self._version_asleep = ""
        self._version_after = ""

    def attach(self) -> None:
        """Replace the worker's methods."""
        worker = self._worker
        replacements: dict[str, Callable[..., Any]] = {
            "sleep": self.sleep,
            "wake_up": self.wake_up,
            "execute_model": self.execute_model,
            "reload_weights": self.reload_weights,
        }
        if getattr(worker.vllm_config.model_config, "enable_sleep_mode", False):
            replacements["load_model"] = self.load_model
        patch_once(worker, **{name: method for name, method in replacements.items() if hasattr(worker, name)})
        worker.penstock_version_after_sleep = lambda: self._version_after

    def load_model(self, original: Callable[..., None], *arguments: Any, **named: Any) -> None:
        """Load the model, and meanwhile prepare the kernels that digest its weights at the first sleep."""
        if self._worker.device.type != "cuda":
            original(*arguments, **named)
            return
        # The kernels must be ready before vLLM's next step, in which it measures the device's memory.
        with kernels_ready(self._worker.device, _logger()):
            original(*arguments, **named)

    def sleep(self, original: Callable[..., None], level: int = 1, *arguments: Any, **named: Any) -> None:
        """Put the worker to sleep. No request may be running."""
        engine = self._engine()
        # Weights that an earlier sleep lost, and that nobody has filled since, stay lost.
        is_sent = self._is_sent_since(engine) and not self._num_lost(engine)
        is_complete = self.is_whole or self._is_intact or is_sent
        if is_complete:
            if self.is_whole or is_sent:
                self._version_asleep = "" if self.is_whole else str(engine.installed)
            self._num_installed = 0 if engine is None else engine.num_installed
            self._version_after = ""
            self._digests = _digests(self._model()) if level == 1 else None
            kept: list[torch.Tensor] = [] if engine is None else engine.not_installed()
            if level == 1:
                # At level 2, vLLM itself preserves the buffers. At level 1, its copy of them may be damaged.
                kept = [*kept, *self._model().buffers()]
            self._kept = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in kept]
        self.is_whole = self._is_intact = False
        self._level, self._asleep = level if is_complete else max(self._level, level), set(_TAGS)
        if engine is not None:
            # Do this before vLLM unmaps memory, because a registration cannot be released once its memory is unmapped.
            engine.fall_asleep()
        original(level, *arguments, **named)

    def wake_up(
        self, original: Callable[..., None], tags: list[str] | None = None, *arguments: Any, **named: Any
    ) -> None:
        """Wake memory. Once all memory is awake, restore the weights.

        If `wake_up` raises a PenstockError, the engine is still asleep. Call `wake_up` again.
        """
        original(tags, *arguments, **named)
        engine = self._engine()
        woken = set(_TAGS) if tags is None else set(tags)
        if "weights" in woken & self._asleep:
            self._is_at_once = woken >= self._asleep
            self._compare(engine)
        self._asleep -= woken
        if self._asleep or self.is_whole:
            return
        if self._is_sent_since(engine):
            # A trainer sent a version after the memory of the weights woke.
            if lost := self._num_lost(engine):
                raise RuntimeError(
                    f"{lost} parameters were lost in the sleep, and the version of the trainer does not fill them: "
                    "call /collective_rpc with the method reload_weights, and send the version again"
                )
            self._whole(str(engine.installed))
        elif self._is_sent or self._is_at_once or self._is_intact:
            self._bring_back(engine)
        else:
            _log("weights were not brought back, because others may fill them between two calls of wake_up")
            self._whole("")

    def _is_sent_since(self, engine: Any) -> bool:
        """Return whether a trainer sent a version after the last sleep with complete weights."""
        return engine is not None and engine.num_installed > self._num_installed

    def _num_lost(self, engine: Any) -> int:
        """Return how many parameters a level-2 sleep discarded that the installed version does not fill."""
        kept = {id(tensor) for tensor, _ in self._kept}
        return sum(id(tensor) not in kept for tensor in engine.not_installed()) if self._level > 1 else 0

    def _compare(self, engine: Any) -> None:
        """Compare the weights with those before the sleep, before anyone can fill them, and put back what is kept."""
        kept = self._kept
        if self._is_sent_since(engine):
            # An earlier call of `wake_up` failed halfway, and a trainer has filled the weights since.
            left = {id(tensor) for tensor in engine.not_installed()}
            kept = [(tensor, value) for tensor, value in kept if id(tensor) in left]
        elif self._level == 1 and self._digests.is_same():
            # At level 1 vLLM copies the weights back. On the CPU vLLM ignores the level and keeps the weights.
            self._is_intact, kept = True, []
        for tensor, value in kept:
            # Write to `data`, because the first forward pass makes inference tensors of some tables of rotary
            # embeddings.
            tensor.data.copy_(value)

    def _bring_back(self, engine: Any) -> None:
        # All workers of an engine receive a version together, although the copy of one worker may be damaged alone.
        if self._is_intact if engine is None else engine.all_agree(self._is_intact):
            self._whole(self._version_asleep)
            return
        if self._level == 1:
            _log("the weights that vLLM copied back from the host differ from those before the sleep, receiving again")
        self._is_intact = False
        if engine is not None and engine.installed >= 0:
            engine.bring_back()
            self._whole(str(engine.installed))
        else:
            # No version was ever installed, so load the engine's original weights.
            self._worker.reload_weights()

    def reload_weights(self, original: Callable[..., None], *arguments: Any, **named: Any) -> None:
        """Reload the weights with vLLM's loader."""
        original(*arguments, **named)
        if "weights" not in self._asleep:
            self._whole("")

    def execute_model(self, original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Run a forward pass. Raise an error if the weights were lost and not restored."""
        if not self.is_whole:
            raise RuntimeError("the weights of this worker were not restored after a sleep: call /wake_up")
        return original(*arguments, **named)

    def _whole(self, version: str) -> None:
        self._version_after = version
        self._kept, self._digests = [], None
        # The memory of loaded adapters was discarded too, or its copy may be damaged too.
        if self._level and not self._is_intact and hasattr(self._worker.model_runner, "reset_lora_state"):
            self._worker.model_runner.reset_lora_state()
        self._level, self._is_intact = 0, False
        self.is_whole = True

    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._worker.model_runner.get_model()
        return model

    def _engine(self) -> Any:
        return self._worker.weight_transfer_engine if self._is_sent else None


def _digests(model: torch.nn.Module) -> Any:
    from penstock.spi import MemoryDigests

    return MemoryDigests.of_target(model)


def _logger() -> Log:
    # Do not import the logger from `penstock_vllm.plugin`, which configures it but imports this module.
    return log_named("penstock.vllm")


def _log(message: str) -> None:
    _logger().warning("penstock: %s", message)
