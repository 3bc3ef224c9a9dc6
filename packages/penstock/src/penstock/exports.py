"""The public names of this package, and the interface for adapters: where each name is defined.

A name is written where it is defined and in one table here. `penstock`, its public modules and `penstock.spi` import it
when it is first used, because torch takes seconds to import and `penstock inspect`, `hub` and `status` need none of it.
Type checkers read the stubs (`.pyi`), which scripts/stubs.py writes from the same tables.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.entry_points import extras_named

PUBLIC = {
    "AttachReport": "penstock.keeper.attach",
    "Attached": "penstock.keeper.attach",
    "BaseMismatch": "penstock.errors",
    "Box": "penstock.types",
    "BudgetTooSmall": "penstock.errors",
    "Cancelled": "penstock.errors",
    "ConfigError": "penstock.errors",
    "ConnectionSettings": "penstock.config",
    "ConvertReport": "penstock.jobs.report",
    "DType": "penstock.types",
    "DestinationError": "penstock.errors",
    "DeviceOutOfMemory": "penstock.errors",
    "DiskFull": "penstock.errors",
    "Emptied": "penstock.loader.emptied",
    "FetchReport": "penstock.fetch.report",
    "Fleet": "penstock.fetch.join",
    "FormatError": "penstock.errors",
    "GrantRefused": "penstock.errors",
    "Hooks": "penstock.sync.receive.hooks",
    "HubReporter": "penstock.hub.job_reporter",
    "HubUnavailable": "penstock.errors",
    "InspectReport": "penstock.loader.verify",
    "IntegrityError": "penstock.errors",
    "Keeper": "penstock.keeper.keeper",
    "LoadReport": "penstock.loader.report",
    "Loading": "penstock.loader.start",
    "Manifest": "penstock.types",
    "ManifestReport": "penstock.loader.verify",
    "MetricsEndpoint": "penstock.telemetry.endpoint",
    "MissingExtra": "penstock.errors",
    "NotFound": "penstock.errors",
    "OperationFailed": "penstock.errors",
    "PeerLost": "penstock.errors",
    "PenstockError": "penstock.errors",
    "PermissionDenied": "penstock.errors",
    "PlanError": "penstock.errors",
    "PublishReport": "penstock.sync.report",
    "Publisher": "penstock.sync.publish.publisher",
    "Shard": "penstock.sync.shards",
    "SourceBusy": "penstock.errors",
    "SourceChanged": "penstock.errors",
    "SourceError": "penstock.errors",
    "SourceStalled": "penstock.errors",
    "SourceTruncated": "penstock.errors",
    "SourceUnavailable": "penstock.errors",
    "StagedVersion": "penstock.sync.check",
    "StaleDescriptor": "penstock.errors",
    "StoredVersion": "penstock.sync.receive.released",
    "Subscriber": "penstock.sync.receive.subscriber",
    "TensorStream": "penstock.loader.load",
    "UnknownMember": "penstock.errors",
    "UnsafeFormat": "penstock.errors",
    "UpdateReport": "penstock.sync.report",
    "Variant": "penstock.fetch.join",
    "VerifyReport": "penstock.loader.verify",
    "VersionNotLive": "penstock.errors",
    "VersionRefused": "penstock.errors",
    "Weights": "penstock.loader.load",
    "WorkerSettings": "penstock.jobs.convert",
    "attach": "penstock.keeper.attach",
    "convert": "penstock.jobs.convert",
    "drain": "penstock.hub.client",
    "empty_module": "penstock.loader.emptied",
    "hand_over": "penstock.keeper.hand_over",
    "inspect": "penstock.loader.verify",
    "join": "penstock.fetch.join",
    "load": "penstock.loader.load",
    "load_file": "penstock.loader.safe_open",
    "load_into": "penstock.loader.into",
    "log_prob_check": "penstock.sync.check",
    "manifest": "penstock.loader.verify",
    "phase": "penstock.phases",
    "publisher": "penstock.sync.publish.publisher",
    "safe_open": "penstock.loader.safe_open",
    "serve_metrics": "penstock.telemetry.endpoint",
    "start_loading": "penstock.loader.start",
    "status": "penstock.hub.client",
    "stream": "penstock.loader.load",
    "subscriber": "penstock.sync.receive.subscribe",
    "tensor_parallel": "penstock.plan.tensor_parallel",
    "verify": "penstock.loader.verify",
    "why": "penstock.hub.client",
}
"""Name -> module that defines it, for `penstock`."""

SPI = {
    "ADAPTERS": "penstock.spi.engine_weights",
    "Arena": "penstock.memory.arena",
    "Around": "penstock.sync.receive.hooks",
    "Closing": "penstock.lifecycle",
    "ControlConnection": "penstock.http.control",
    "Declarable": "penstock.sync.shards",
    "Digester": "penstock.sync.digester",
    "Header": "penstock.storage.safetensors",
    "HostPlugin": "penstock.spi.host_plugin",
    "INDEX_SUFFIX": "penstock.storage.locate",
    "Laggards": "penstock.sync.together",
    "LoadFunction": "penstock.sync.recording.layout:Load",
    "Log": "penstock.logs",
    "LoraMerge": "penstock.jobs.operations.lora",
    "MIN_CHUNK_BYTES": "penstock.loader.session",
    "MalformedAnswer": "penstock.http.control",
    "Memory": "penstock.transport.protocol",
    "MemoryDigests": "penstock.sync.memory_digests",
    "NOT_USABLE": "penstock.keeper.attach",
    "NetworkFile": "penstock.storage.network_files",
    "Options": "penstock.loader.session",
    "OutputSet": "penstock.storage.output",
    "Phases": "penstock.phases",
    "Placed": "penstock.sync.placed",
    "ProgressOption": "penstock.loader.progress",
    "PublishMode": "penstock.sync.report",
    "ReceivedVersions": "penstock.spi.received",
    "Recipe": "penstock.plan.tasks",
    "RegisteredStorages": "penstock.transport.storages",
    "Requirements": "penstock.sync.recording.requirements",
    "SUFFIX": "penstock.storage.locate",
    "SafeSlice": "penstock.loader.safe_open",
    "Session": "penstock.loader.session",
    "Settings": "penstock.config",
    "ShardRow": "penstock.sync.shards:Row",
    "SharedFile": "penstock.loader.shared_files",
    "SharedFiles": "penstock.loader.shared_files",
    "SharedReadReport": "penstock.loader.shared_read",
    "Source": "penstock.storage",
    "Strips": "penstock.digest.strip",
    "Summarised": "penstock.report",
    "Target": "penstock.sync.receive.target",
    "TensorSpec": "penstock.plan.tasks:Spec",
    "TensorTable": "penstock.types",
    "Threads": "penstock.waits",
    "Transforms": "penstock.sync.publish.transformed",
    "UpdateMode": "penstock.sync.report",
    "VersionSender": "penstock.spi.sender",
    "WholeTensorShares": "penstock.spi.sender",
    "bytes_text": "penstock.report",
    "copy_other_files": "penstock.fetch.storage_initializer",
    "declared_shards": "penstock.sync.shards:declared",
    "deferred": "penstock.lifecycle",
    "display": "penstock.storage.locate",
    "download_files": "penstock.storage.download:download",
    "dtype_of": "penstock.loader.tensor",
    "extras_named": "penstock.entry_points",
    "first_token": "penstock.hub.auth",
    "group_of_all": "penstock.spi.received",
    "install_hint": "penstock.entry_points",
    "is_remote": "penstock.storage",
    "kernels_ready": "penstock.spi.sleep_kernels",
    "lay_out_tensors": "penstock.plan.tasks:lay_out",
    "layout": "penstock.sync.recording",
    "let_go_in_children": "penstock.lifecycle",
    "list_uris": "penstock.storage",
    "local_path": "penstock.storage",
    "log_named": "penstock.logs",
    "model_name": "penstock.storage.locate",
    "needed_bytes": "penstock.memory.arena",
    "network_file_system": "penstock.storage.network_files",
    "open_source": "penstock.storage",
    "open_stream": "penstock.loader.load",
    "open_weights": "penstock.storage.weight_set",
    "over_tcp": "penstock.http.control",
    "parse_bytes": "penstock.config",
    "parse_repository": "penstock.storage.repository:parse",
    "path_inside": "penstock.storage.download:inside",
    "pinned_uri": "penstock.storage:pinned",
    "private_directory": "penstock.net.unix_sockets",
    "read_header": "penstock.storage.safetensors",
    "read_object": "penstock.storage.foreign_json",
    "read_small": "penstock.storage",
    "record": "penstock.sync.recording.requirements",
    "regions_of": "penstock.sync.shards",
    "require_name": "penstock.arguments",
    "require_package": "penstock.entry_points",
    "require_same": "penstock.sync.publish.registered",
    "resolve_device": "penstock.loader.session",
    "revision_of": "penstock.peer.local_weights",
    "runai_settings": "penstock.config",
    "tabulate": "penstock.peer.local_weights",
    "text_of": "penstock.storage",
    "texts_of": "penstock.storage.locate",
    "timed_source": "penstock.storage:timed",
    "torch_dtype": "penstock.loader.tensor",
    "torch_shape": "penstock.loader.tensor",
    "typed_error_of_hub": "penstock.storage.hugging_face:typed_error",
    "typed_errors_of_writing": "penstock.storage.write:typed",
    "unwrapped": "penstock.sync.shards",
    "write_object": "penstock.storage.foreign_json",
    "wrong_argument": "penstock.arguments:wrong",
}
"""Name -> module that defines it, or `module:name` where it has another name there, for `penstock.spi`."""


def lazily(module: str, table: Mapping[str, str], *, others: Iterable[str] = ()) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module whose names are in a table.

    Args:
        module: name of the module, for the error.
        table: name -> the module that defines it, or `module:name`.
        others: submodules that can be reached as attributes without an import.
    """
    submodules = frozenset(others)

    def resolve(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{module}.{name}")
        if name not in table:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, _, there = table[name].partition(":")
        # Rooms import torch at their head. Here, and not in each verb, a missing package becomes MissingExtra.
        with extras_named():
            return getattr(importlib.import_module(place), there or name)

    return resolve
