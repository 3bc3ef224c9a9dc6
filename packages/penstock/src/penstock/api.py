"""The public verbs and their results, nothing else; each room is imported when its first name is used.

`inspect`, `verify`, `manifest`, `status` and `why` need no torch; the others do.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.entry_points import extras_named

if TYPE_CHECKING:
    from penstock.fetch.join import Fleet, Variant, join
    from penstock.fetch.report import FetchReport
    from penstock.hub.client import drain, status, why
    from penstock.hub.job_reporter import HubReporter
    from penstock.jobs.convert import WorkerSettings, convert
    from penstock.jobs.report import ConvertReport
    from penstock.keeper.attach import Attached, AttachReport, attach
    from penstock.keeper.hand_over import hand_over
    from penstock.keeper.keeper import Keeper
    from penstock.loader.emptied import Emptied, empty_module
    from penstock.loader.into import load_into
    from penstock.loader.load import TensorStream, Weights, load, stream
    from penstock.loader.report import LoadReport
    from penstock.loader.safe_open import load_file, safe_open
    from penstock.loader.start import Loading, start_loading
    from penstock.loader.verify import InspectReport, ManifestReport, VerifyReport, inspect, manifest, verify
    from penstock.phases import phase
    from penstock.plan.tensor_parallel import tensor_parallel
    from penstock.sync.check import StagedVersion, log_prob_check
    from penstock.sync.publish.publisher import Publisher, publisher
    from penstock.sync.receive.hooks import Hooks
    from penstock.sync.receive.released import StoredVersion
    from penstock.sync.receive.subscribe import subscriber
    from penstock.sync.receive.subscriber import Subscriber
    from penstock.sync.report import PublishReport, UpdateReport
    from penstock.sync.shards import Shard
    from penstock.telemetry.endpoint import MetricsEndpoint, serve_metrics

# Name -> module below `penstock`. Must agree with the imports above, which only type checkers see.
_ROOMS = {
    "AttachReport": "keeper.attach",
    "Attached": "keeper.attach",
    "ConvertReport": "jobs.report",
    "Emptied": "loader.emptied",
    "FetchReport": "fetch.report",
    "Fleet": "fetch.join",
    "Hooks": "sync.receive.hooks",
    "HubReporter": "hub.job_reporter",
    "InspectReport": "loader.verify",
    "Keeper": "keeper.keeper",
    "LoadReport": "loader.report",
    "Loading": "loader.start",
    "ManifestReport": "loader.verify",
    "MetricsEndpoint": "telemetry.endpoint",
    "PublishReport": "sync.report",
    "Publisher": "sync.publish.publisher",
    "Shard": "sync.shards",
    "StagedVersion": "sync.check",
    "StoredVersion": "sync.receive.released",
    "Subscriber": "sync.receive.subscriber",
    "TensorStream": "loader.load",
    "UpdateReport": "sync.report",
    "Variant": "fetch.join",
    "VerifyReport": "loader.verify",
    "Weights": "loader.load",
    "WorkerSettings": "jobs.convert",
    "attach": "keeper.attach",
    "convert": "jobs.convert",
    "drain": "hub.client",
    "empty_module": "loader.emptied",
    "hand_over": "keeper.hand_over",
    "inspect": "loader.verify",
    "join": "fetch.join",
    "load": "loader.load",
    "load_file": "loader.safe_open",
    "load_into": "loader.into",
    "log_prob_check": "sync.check",
    "manifest": "loader.verify",
    "phase": "phases",
    "publisher": "sync.publish.publisher",
    "safe_open": "loader.safe_open",
    "serve_metrics": "telemetry.endpoint",
    "start_loading": "loader.start",
    "status": "hub.client",
    "stream": "loader.load",
    "subscriber": "sync.receive.subscribe",
    "tensor_parallel": "plan.tensor_parallel",
    "verify": "loader.verify",
    "why": "hub.client",
}

__all__ = [
    "AttachReport",
    "Attached",
    "ConvertReport",
    "Emptied",
    "FetchReport",
    "Fleet",
    "Hooks",
    "HubReporter",
    "InspectReport",
    "Keeper",
    "LoadReport",
    "Loading",
    "ManifestReport",
    "MetricsEndpoint",
    "PublishReport",
    "Publisher",
    "Shard",
    "StagedVersion",
    "StoredVersion",
    "Subscriber",
    "TensorStream",
    "UpdateReport",
    "Variant",
    "VerifyReport",
    "Weights",
    "WorkerSettings",
    "attach",
    "convert",
    "drain",
    "empty_module",
    "hand_over",
    "inspect",
    "join",
    "load",
    "load_file",
    "load_into",
    "log_prob_check",
    "manifest",
    "phase",
    "publisher",
    "safe_open",
    "serve_metrics",
    "start_loading",
    "status",
    "stream",
    "subscriber",
    "tensor_parallel",
    "verify",
    "why",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Rooms import torch at their head: here, and not in each verb, a missing package becomes MissingExtra.
    with extras_named():
        return getattr(importlib.import_module(f"penstock.{_ROOMS[name]}"), name)
