"""Sends the weights of TRL's asynchronous GRPO trainer to a vLLM server as published shards.

`PenstockWeightTransfer` is a `WeightTransferProtocol` for `AsyncGRPOTrainer`. TRL calls the transfer only on the main
process, with unsharded tensors. `attach`, called on every rank, replaces TRL's own function for sending weights. After
`attach`, no tensors are gathered, and the server pauses only for the installation. A trainer with one process and no
sharding needs no `attach`.

A restarted server has only the weights in its files. An attached transfer detects a server's restart when sending the
next version, or while the trainer waits for samples (`restore`), and then sends the newest version to the server.

Written for TRL 1.16 and the releases of vLLM that `penstock_vllm.trainer` names.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import requests
import torch
from transformers import TrainerCallback
from trl import __version__ as trl_version
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.vllm_client import VLLMClient
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

from penstock.errors import ConfigError
from penstock_hf.lora_merge import MergedTensors
from penstock_vllm.trainer import PenstockTrainerEngine, PenstockTrainerInitInfo

VERSIONS = ("1.16",)
"""Supported releases of TRL. This module replaces a method that is not public."""

_HOOK = "_sync_weight_merged"

_GONE = (requests.ConnectionError, requests.exceptions.ChunkedEncodingError)
"""Errors that a request raises if the server is not running or exits during the request."""


class _EndOfTraining(TrainerCallback):  # type: ignore[misc]
    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def on_train_end(self, *arguments: Any, **named: Any) -> None:
        """See `TrainerCallback`."""
        self._function()


class PenstockWeightTransfer:
    """A weight transfer for `AsyncGRPOTrainer`. Each rank creates its own transfer.

    An unsupported release of TRL raises ConfigError.

    Args:
        server_url: URL of the vLLM server, which was started with `--weight-transfer-config '{"backend": "penstock"}'`
            and `VLLM_SERVER_DEV_MODE=1`.
        info: name of the sync and its options. `rank` and `world_size` come from the trainer.
        timeout_s: deadline in seconds for one request to the server. A request may last until the server has received a
            whole version.
        restart_s: seconds to wait for a server that is starting or restarting.

    Attributes:
        engine: sender of the versions, or None before the first version. `engine.report` describes the newest version.
        num_restored: number of times that the newest version was sent to a restarted server.
    """

    def __init__(
        self, server_url: str, info: PenstockTrainerInitInfo, *, timeout_s: float = 1800.0, restart_s: float = 600.0
    ) -> None:
        if not trl_version.startswith(tuple(f"{version}." for version in VERSIONS)):
            raise ConfigError(
                f"Penstock supports TRL {', '.join(VERSIONS)}, not {trl_version}",
                hint="install one of these releases, or send the weights with penstock_vllm.trainer from a callback",
            )
        self.engine: PenstockTrainerEngine | None = None
        self.num_restored = 0
        self._server = VLLMClient(server_url, restart_s)
        self._restart_s = restart_s
        self._client = HTTPVLLMWeightSyncClient(server_url, timeout=timeout_s)
        self._info = info
        # Name under which the server reports the last version that was sent to it.
        self._installed: str | None = None
        self._kept: dict[str, torch.Tensor] = {}
        self._merged: MergedTensors | None = None

    def attach(self, trainer: Any) -> None:
        """Make a trainer publish the shards of every rank. Call this on all ranks, before `train`.

        Raises ConfigError if the trainer is not an AsyncGRPOTrainer.
        """
        if not callable(getattr(trainer, _HOOK, None)):
            raise ConfigError(f"a {type(trainer).__name__} has no {_HOOK}", hint="pass an AsyncGRPOTrainer")
        accelerator = trainer.accelerator
        self._info = copy.copy(self._info)
        self._info.rank, self._info.world_size = accelerator.process_index, accelerator.num_processes
        setattr(trainer, _HOOK, lambda started: self._sync(trainer, started))
        if trainer.rollout_worker is not None:
            self._restore_while_waiting(trainer.rollout_worker)
        # On the main process TRL itself closes the transfer.
        if trainer.weight_transfer is None:
            trainer.add_callback(_EndOfTraining(self.destroy))

    # -- TRL's protocol, on the main process

    def init_weight_transfer(self) -> None:
        """Wait for the server. The sync begins later, when all ranks send the first version."""
        self._server.wait_for_server_ready()

    def pause(self) -> None:
        """Pause the server. Running requests continue afterwards."""
        self._server.pause()

    def resume(self) -> None:
        """Let the server continue."""
        self._server.resume()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Send whole tensors from one process. Raises the same errors as `PenstockTrainerEngine.send_weights`.

        Raises ConfigError if the trainer has several ranks, because each rank then has to publish its shards.
        """
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ConfigError(
                "the trainer has several ranks but is not attached", hint="call attach(trainer) on every rank"
            )
        for name, tensor in iterator:
            kept = self._kept.setdefault(name, tensor)
            # A parameter is published from its own memory. A tensor that TRL has moved is copied into the published
            # tensor.
            if kept.data_ptr() != tensor.data_ptr():
                kept.copy_(tensor)
        self._engine(self._kept).send_weights()

    def destroy(self) -> None:
        """Leave the sync. The server keeps the version that it serves. Idempotent."""
        if self.engine is not None:
            self.engine.shutdown()
            self.engine = None

    def restore(self) -> bool:
        """Send the newest version to the server if the server was restarted. Return whether the version was sent.

        Call this function only on the main process. After `attach`, TRL calls `restore` while the trainer waits for
        samples. If the server does not respond, `restore` returns without waiting. Raises the same errors as
        `PenstockTrainerEngine.stage_again` and `commit`.
        """
        if self.engine is None or self._installed is None:
            return False
        try:
            if self._served() == self._installed:
                return False
        except _GONE:
            return False
        self._give_again(self.engine)
        return True

    # -- after `attach`: on every rank

    def _sync(self, trainer: Any, started: float) -> tuple[float, float, float]:
        """Send a version from all ranks, in place of TRL's own function.

        Return three timestamps, as TRL's step does.
        """
        accelerator = trainer.accelerator
        model = accelerator.unwrap_model(trainer.model)
        accelerator.wait_for_everyone()
        barrier = time.time()
        # The server has only the base model's tensors, so the adapter is merged in separate buffers. PEFT's in-place
        # merge and unmerge would leave a rounding error in the base at every step.
        if async_grpo_trainer.is_peft_model(model):
            if self._merged is None:
                self._merged = MergedTensors(model)
            self._merged.refresh()
            engine = self._engine(self._merged.published)
        else:
            engine = self._engine(dict(async_grpo_trainer._iter_vllm_named_params(model)))
        lost: requests.RequestException | None = None
        try:
            engine.stage()
        except requests.RequestException as error:
            # Every rank has published the version, so the server can receive it later.
            lost = error
        received = time.time()
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            try:
                if lost is not None:
                    raise lost
                self._install(engine)
            except requests.RequestException as error:
                if not self._was_started_again(error):
                    raise
                self._give_again(engine)
            trainer.model_version += 1
            if trainer.rollout_worker:
                trainer.rollout_worker.update_model_version(trainer.model_version)
        # TRL logs these times as the end of the pause, of the barrier and of the transfer.
        return started, barrier, received

    def _install(self, engine: PenstockTrainerEngine) -> None:
        self.pause()
        # If `commit` fails, the server stays paused, because it has no complete version.
        engine.commit()
        self.resume()
        self._installed = str(engine.version)

    def _give_again(self, engine: PenstockTrainerEngine) -> None:
        """Send the newest version to a restarted server.

        If the server exits again, retry until `restart_s` has passed.
        """
        deadline = time.monotonic() + self._restart_s
        while True:
            self._server.wait_for_server_ready()
            try:
                engine.stage_again()
                self._install(engine)
            except _GONE:
                if time.monotonic() > deadline:
                    raise
                continue
            self.num_restored += 1
            return

    def _was_started_again(self, error: requests.RequestException) -> bool:
        """Return whether a request failed because the server was restarted. May wait until the server is ready."""
        if isinstance(error, _GONE):
            return True
        # A server that refuses the request was restarted if it no longer has the last version that this process sent.
        self._server.wait_for_server_ready()
        return self._installed is not None and self._served() != self._installed

    def _served(self) -> str:
        answer = requests.get(f"{self._server.server_url}/weight_info", timeout=60)
        answer.raise_for_status()
        return str(answer.json()["weight_version"])

    def _restore_while_waiting(self, worker: Any) -> None:
        """Make TRL call `restore` after each health check of a rollout worker. TRL checks while waiting for samples."""
        check_health = worker.check_health

        def check(stale_after_s: float) -> None:
            check_health(stale_after_s)
            self.restore()

        worker.check_health = check

    def _engine(self, params: dict[str, Any]) -> PenstockTrainerEngine:
        if self.engine is None:
            self.engine = PenstockTrainerEngine.trainer_init(self._info, client=self._client, source=params)
        return self.engine
