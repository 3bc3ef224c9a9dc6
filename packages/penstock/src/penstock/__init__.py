"""Penstock: model weights to GPUs at the speed of the link, verified, in bounded memory.

The public names are in `__all__`; verbs are imported, and torch with them, when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from penstock.config import ConnectionSettings
from penstock.entry_points import extras_named, own_version
from penstock.errors import (
    BaseMismatch,
    BudgetTooSmall,
    Cancelled,
    ConfigError,
    DestinationError,
    DeviceOutOfMemory,
    DiskFull,
    FormatError,
    GrantRefused,
    HubUnavailable,
    IntegrityError,
    MissingExtra,
    NotFound,
    OperationFailed,
    PeerLost,
    PenstockError,
    PermissionDenied,
    PlanError,
    SourceBusy,
    SourceChanged,
    SourceError,
    SourceStalled,
    SourceTruncated,
    SourceUnavailable,
    StaleDescriptor,
    UnknownMember,
    UnsafeFormat,
    VersionNotLive,
    VersionRefused,
)
from penstock.types import Box, DType, Manifest

if TYPE_CHECKING:
    import penstock_compile_cache
    from penstock import Attached, AttachReport, ConvertReport, Emptied, FetchReport, Fleet, Hooks, HubReporter, InspectReport, Keeper, Loading, LoadReport, ManifestReport, MetricsEndpoint, Publisher, PublishReport, Shard, StagedVersion, StoredVersion, Subscriber, TensorStream, UpdateReport, Variant, VerifyReport, Weights, WorkerSettings, attach, convert, drain, empty_module, hand_over, inspect, join, load, load_file, load_into, log_prob_check, manifest, phase, publisher, safe_open, serve_metrics, start_loading, status, stream, subscriber, tensor_parallel, verify, why

__version__ = own_version()

__all__ = [
    "AttachReport",
    "Attached",
    "BaseMismatch",
    "Box",
    "BudgetTooSmall",
    "Cancelled",
    "ConfigError",
    "ConnectionSettings",
    "ConvertReport",
    "DType",
    "DestinationError",
    "DeviceOutOfMemory",
    "DiskFull",
    "Emptied",
    "FetchReport",
    "Fleet",
    "FormatError",
    "GrantRefused",
    "Hooks",
    "HubReporter",
    "HubUnavailable",
    "InspectReport",
    "IntegrityError",
    "Keeper",
    "LoadReport",
    "Loading",
    "Manifest",
    "ManifestReport",
    "MetricsEndpoint",
    "MissingExtra",
    "NotFound",
    "OperationFailed",
    "PeerLost",
    "PenstockError",
    "PermissionDenied",
    "PlanError",
    "PublishReport",
    "Publisher",
    "Shard",
    "SourceBusy",
    "SourceChanged",
    "SourceError",
    "SourceStalled",
    "SourceTruncated",
    "SourceUnavailable",
    "StagedVersion",
    "StaleDescriptor",
    "StoredVersion",
    "Subscriber",
    "TensorStream",
    "UnknownMember",
    "UnsafeFormat",
    "UpdateReport",
    "Variant",
    "VerifyReport",
    "VersionNotLive",
    "VersionRefused",
    "Weights",
    "WorkerSettings",
    "__version__",
    "artifacts",
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


# Lazy, because torch takes seconds to import, and `penstock inspect`, `hub` and `status` need none of it.
def __getattr__(name: str) -> Any:
    if name == "artifacts":
        with extras_named():
            return importlib.import_module("penstock_compile_cache")
    if name in __all__:
        return getattr(importlib.import_module("penstock"), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
