"""vLLM's parameters, fused and sharded, kept for the next engine of the same configuration: the option `"finished"`.

In: a new model of vLLM, its configuration, its own loading. Out: the model with its weights: those of a keeper of this
host, without a copy, or loaded and handed over.
Not here: the keeper (`keeper.hand_over`), when this is called (`vllm`).

The parameters are kept as vLLM's loader leaves them, before it packs them for its kernels: on the CPU a mapping is
private, so what vLLM then writes is its own. On a GPU it would be seen by every engine, so these are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.artifacts.key import key_of
from penstock.config import ConnectionSettings, Settings
from penstock.errors import BudgetTooSmall, ConfigError, HubUnavailable, NotFound, PlanError
from penstock.hub.auth import first_token
from penstock.keeper.attach import attach
from penstock.keeper.hand_over import hand_over
from penstock.peer.local_weights import revision_of
from penstock.storage.locate import model_name
from penstock.storage.weight_set import open_weights


def load_finished(
    model: torch.nn.Module,
    vllm_config: Any,
    uri: str,
    options: Mapping[str, Any],
    rank: str,
    load: Callable[[], None],
    log: logging.Logger,
) -> None:
    """Bind a new model to a keeper's parameters; if there are none, load it and hand its parameters over.

    Args:
        model: empty, on the CPU.
        vllm_config: vLLM's configuration.
        uri: the checkpoint.
        options: as `replica.read_options` returns them.
        rank: tells this process apart from the others of one engine: `0/2`.
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
    with open_weights(uri, settings=Settings.read(), storage_options=stores) as weights:
        revision = revision_of(weights.manifest)
    described = {"vllm_config": vllm_config.compute_hash(), "rank": rank, "model": type(model).__qualname__}
    name = f"{model_name(uri)}.{key_of(revision, engine='vllm', config=described).id}"
    connection = ConnectionSettings(hub=options.get("hub"), token=first_token(options.get("token_file")))
    verify = options.get("verify", True)
    try:
        attached = attach(name, connection=connection, device="cpu", verify=verify, wait_s=0)
    except (NotFound, HubUnavailable) as error:
        log.info("penstock: %s is loaded: %s", uri, error.message)
    else:
        attached.attach_into(model)
        log.info("penstock: finished parameters: %s", attached.report.summary())
        return
    load()
    try:
        report = hand_over(model, name, connection=connection, verify=verify).report
    # The engine starts all the same.
    except (NotFound, HubUnavailable, BudgetTooSmall, PlanError) as error:
        log.warning("penstock: the parameters of %s are not kept for the next engine: %s", uri, error)
    else:
        log.info("penstock: handed over: %s", report.summary())
