"""vLLM's parameters, fused and sharded, kept for the next engine of the same configuration: the option `"finished"`.

In: a new model of vLLM, its configuration, its own loading. Out: the model with its weights: those of a keeper of this
host, without a copy; or made of those that a keeper has of another number of ranks; or loaded. The last two are handed
over.
Not here: the keeper (`keeper.hand_over`), parameters of other sizes (`sync.finished`), when this is called (`vllm`).

The parameters are kept as vLLM's loader leaves them, before it packs them for its kernels: on the CPU a mapping is
private, so what vLLM then writes is its own. On a GPU it would be seen by every engine, so these are refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from penstock_compile_cache.key import key_of
from penstock.config import ConnectionSettings, Settings
from penstock.errors import ConfigError, HubUnavailable, NotFound, OperationFailed, PenstockError, PlanError
from penstock.hub.auth import first_token
from penstock.keeper.attach import NOT_USABLE, attach, kept_here
from penstock.keeper.hand_over import hand_over
from penstock.lifecycle import paused_gc
from penstock.logs import Log
from penstock.peer.local_weights import revision_of
from penstock.storage.locate import model_name
from penstock.storage.weight_set import open_weights
from penstock.sync.finished import KeptSet, kept_layout, kept_sets, reshard
from penstock.sync.recording.layout import Recording
from penstock.sync.recording.requirements import record
from penstock.types import TensorTable

_NOT_KEPT: tuple[type[PenstockError], ...] = (*NOT_USABLE, OperationFailed)
_OF_LOADERS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What code that loads weights raises where it gets tensors without values."""


def load_finished(
    model: torch.nn.Module,
    model_config: Any,
    vllm_config: Any,
    uri: str,
    options: Mapping[str, Any],
    rank: int,
    size: int,
    load: Callable[[], None],
    log: Log,
) -> None:
    """Bind a new model to a keeper's parameters; if there are none, fill it otherwise and hand its parameters over.

    Args:
        model: empty, on the CPU.
        model_config: vLLM's configuration of the model, the same for all sizes of an engine.
        vllm_config: vLLM's configuration of the engine.
        uri: the checkpoint.
        options: as `replica.read_options` returns them.
        rank: rank of this process among those of the engine.
        size: the number of these.
        load: vLLM's own loading of the checkpoint.
        log: logger of the integration.

    Raises:
        ConfigError: the model is not on the CPU.
    """
    devices = {tensor.device.type for tensor in model.state_dict().values()}
    if devices != {"cpu"}:
        hint = 'leave out "finished": "keeper" attaches to the checkpoint'
        raise ConfigError(f'"finished" is for engines on the CPU, and this one is on {sorted(devices)}', hint=hint)
    stores = options.get("storage_options")
    revision, table = _read_headers(uri, stores)
    # Engines of two sizes differ in more than the size: vLLM's limits of a batch depend on it. So the name is of the
    # model alone, and the rest is among the coordinates.
    described = {"model_config": model_config.compute_hash(), "model": type(model).__qualname__}
    name = f"{model_name(uri)}.{key_of(revision, engine='vllm', config=described).id}"
    start = _Start(
        model=model,
        table=table,
        uri=uri,
        name=name,
        own=KeptSet(size, vllm_config.compute_hash()),
        connection=ConnectionSettings(hub=options.get("hub"), token=first_token(options.get("token_file"))),
        verify=options.get("verify", True),
        log=log,
    )
    others: list[KeptSet] = []
    try:
        with ExitStack() as stack:
            attached = stack.enter_context(
                attach(
                    name,
                    connection=start.connection,
                    device="cpu",
                    parallel=start.own.coordinates(rank),
                    verify=start.verify,
                    timeout_s=0,
                )
            )
            attached.attach_into(model)
            # Only now: if the model cannot be bound, its load must not hold a lease.
            stack.pop_all()
    # As text, here and below: a record that a handler keeps would keep the frames of an exception, and the model.
    except (NotFound, HubUnavailable) as error:
        log.info("penstock: the parameters of %s are not kept for this rank: %s", uri, str(error))
        if not isinstance(error, HubUnavailable):
            others = start.others()
    except NOT_USABLE as error:
        log.warning("penstock: the kept parameters of %s cannot be used for this rank: %s", uri, str(error))
        others = start.others()
    else:
        log.info("penstock: finished parameters: %s", attached.report)
        return
    # Recorded before the load only if it is used at once: the loader's first run is then its own, as without a keeper.
    recording = start.recorded() if others else None
    if recording is None or not start.fill_from(others, recording):
        load()
        if not start.has_loaded(revision, stores):
            return
    if not others:
        recording = start.recorded()
    start.keep(rank, recording)


def _read_headers(uri: str, storage_options: Mapping[str, str] | None) -> tuple[str, TensorTable]:
    """Return the revision and the tensors of the checkpoint as it is now."""
    with open_weights(uri, settings=Settings.read(), storage_options=storage_options) as weights:
        return revision_of(weights.manifest), weights.manifest.tensors


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Start:
    """The start of one rank whose own parameters are not kept. Each method logs what it did, or why it could not."""

    model: torch.nn.Module
    table: TensorTable
    """The checkpoint."""
    uri: str
    name: str
    """The name under which the model is kept, of all sizes."""
    own: KeptSet
    connection: ConnectionSettings
    verify: bool
    log: Log

    def others(self) -> list[KeptSet]:
        """Return the other engines of this model whose ranks are all kept."""
        try:
            sets, lacking = kept_sets(kept_here(self.name, device="cpu", connection=self.connection), self.own)
        except NOT_USABLE as error:
            self.log.warning("penstock: the kept parameters of other engines are not known: %s", str(error))
            return []
        for why in lacking:
            self.log.warning("penstock: %s is not made of the parameters of another engine: %s", self.uri, why)
        return sets

    def recorded(self) -> Recording | None:
        """Return a recording of the model's loader; None: it cannot be recorded."""
        begun = time.perf_counter()
        try:
            with paused_gc():
                recording = record(self.model, self._read_by_model())
        except (PlanError, *_OF_LOADERS) as error:
            why = f"its loader cannot be recorded: {type(error).__name__}: {error}"
            self.log.warning("penstock: %s cannot be exchanged with engines of another size: %s", self.uri, why)
            return None
        self.log.info("penstock: the loader of %s was recorded in %.3f s", self.uri, time.perf_counter() - begun)
        return recording

    def _read_by_model(self) -> TensorTable:
        """Return the tensors that vLLM gives to the model's loader. PlanError: it does not read them all from there."""
        if getattr(self.model, "secondary_weights", ()) or getattr(self.model, "allow_patterns_overrides", None):
            raise PlanError("the model's code chooses its files itself")
        is_unused = getattr(self.model, "is_unused_checkpoint_weight", None)
        if is_unused is None:
            return self.table
        return self.table.take([row for row, name in enumerate(self.table.names) if not is_unused(name)])

    def fill_from(self, others: Sequence[KeptSet], recording: Recording) -> bool:
        """Fill the model from the first of these engines from which it can be; return whether that was done."""
        for source in others:
            try:
                report = reshard(
                    self.model, recording, self.table, self.name, source, connection=self.connection, verify=self.verify
                )
            except NOT_USABLE as error:
                message = "penstock: %s is not made of the parameters of %d kept ranks: %s"
                self.log.warning(message, self.uri, source.size, str(error))
            else:
                self.log.info("penstock: %s", report)
                return True
        return False

    def has_loaded(self, revision: str, storage_options: Mapping[str, str] | None) -> bool:
        """Return whether the checkpoint has this revision after the load, too, so that it is what was loaded."""
        try:
            after, _ = _read_headers(self.uri, storage_options)
            if after == revision:
                return True
            why = f"the checkpoint changed during the load: it was {revision}, now it is {after}"
        except PenstockError as error:
            why = f"the checkpoint cannot be read after the load: {error}"
        self.log.warning("penstock: the parameters of %s are not kept for the next engine: %s", self.uri, why)
        return False

    def keep(self, rank: int, recording: Recording | None) -> None:
        """Hand the model over to a keeper, with its layout if there is a recording. The engine starts in any case."""
        layout = b""
        if recording is not None:
            try:
                layout = kept_layout(self.model, recording, self.table)
            except PlanError as error:
                self.log.warning("penstock: engines of another size will load %s from files: %s", self.uri, str(error))
        try:
            report = hand_over(
                self.model,
                self.name,
                connection=self.connection,
                verify=self.verify,
                parallel=self.own.coordinates(rank),
                layout=layout,
            ).report
        except _NOT_KEPT as error:
            self.log.warning(
                "penstock: the parameters of %s are not kept for the next engine: %s", self.uri, str(error)
            )
        else:
            self.log.info("penstock: handed over: %s", report)
