"""The public names of this package, and the interface for adapters: where each name is defined.

A name is written where it is defined and in one table here. `penstock`, its public modules and `penstock.spi` import it
when it is first used, because torch takes seconds to import and `penstock inspect`, `hub` and `status` need none of it.
Type checkers read the stubs (`.pyi`), which scripts/stubs.py writes from the same tables.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from penstock.entry_points import extras_named

PUBLIC = {
    "Box": "penstock.types",
    "ConfigError": "penstock.errors",
    "ConnectionSettings": "penstock.config",
    "ConvertReport": "penstock.jobs.report",
    "DType": "penstock.types",
    "FetchReport": "penstock.fetcher.report",
    "Fleet": "penstock.fetcher.join",
    "Hooks": "penstock.sync.receive.hooks",
    "HubUnavailable": "penstock.errors",
    "IntegrityError": "penstock.errors",
    "LoadReport": "penstock.loader.report",
    "Manifest": "penstock.types",
    "NotFound": "penstock.errors",
    "PenstockError": "penstock.errors",
    "PlanError": "penstock.errors",
    "PublishReport": "penstock.sync.report",
    "Shard": "penstock.sync.shards",
    "SourceError": "penstock.errors",
    "TensorStream": "penstock.loader.load",
    "UpdateReport": "penstock.sync.report",
    "Variant": "penstock.fetcher.join",
    "VersionRefused": "penstock.errors",
    "Weights": "penstock.loader.load",
    "convert": "penstock.jobs.convert",
    "inspect": "penstock.loader.verify",
    "join": "penstock.fetcher.join",
    "load": "penstock.loader.load",
    "load_file": "penstock.loader.safe_open",
    "load_into": "penstock.loader.into",
    "manifest": "penstock.loader.verify",
    "publisher": "penstock.sync.publish.publisher",
    "safe_open": "penstock.loader.safe_open",
    "stream": "penstock.loader.load",
    "subscriber": "penstock.sync.receive.subscribe",
    "tensor_parallel": "penstock.plan.tensor_parallel",
    "verify": "penstock.loader.verify",
}
"""Name -> module that defines it, for `penstock`."""

MODULES = {
    "cache": {
        "AttachReport": "penstock.cache.attached",
        "Attached": "penstock.cache.attached",
        "WeightCache": "penstock.cache.weight_cache",
        "attach": "penstock.cache.attached",
        "cache_parameters": "penstock.cache.engine_parameters",
    },
    "hub": {
        "HubReporter": "penstock.hub.job_reporter",
        "drain": "penstock.hub.client",
        "status": "penstock.hub.client",
        "why": "penstock.hub.client",
    },
    "jobs": {
        "WorkerSettings": "penstock.jobs.convert",
    },
    "modules": {
        "BackgroundLoad": "penstock.loader.start",
        "load_in_background": "penstock.loader.start",
    },
    "reports": {
        "InspectReport": "penstock.loader.verify",
        "ManifestReport": "penstock.loader.verify",
        "VerifyReport": "penstock.loader.verify",
    },
    "sync": {
        "Publisher": "penstock.sync.publish.publisher",
        "StagedVersion": "penstock.sync.check",
        "StoredVersion": "penstock.sync.receive.released",
        "Subscriber": "penstock.sync.receive.subscriber",
    },
    "telemetry": {
        "MetricsEndpoint": "penstock.telemetry.endpoint",
        "phase": "penstock.phases",
        "serve_metrics": "penstock.telemetry.endpoint",
    },
}
"""Public module below `penstock` -> its names, each with the module that defines it.

Errors are in `penstock.errors`.
"""

GUESSES = {
    "Keeper": "penstock.cache.WeightCache",
    "Publisher": "penstock.publisher(name, model)",
    "Subscriber": "penstock.subscriber(name, model)",
    "artifacts": "the package penstock_compile_cache (pip install penstock-compile-cache)",
    "attach": "penstock.cache.attach(name)",
    "drain": "penstock.hub.drain(member)",
    "fetch": "penstock.join(name).fetch(model)",
    "get": "penstock.subscriber(name, model).update()",
    "load_model": "penstock.load_into(model, uri)",
    "load_state_dict": "penstock.load_into(model, uri)",
    "put": "penstock.publisher(name, model).publish()",
    "save": "penstock.convert(source, destination), or safetensors.torch.save_file(tensors, file)",
    "save_file": "safetensors.torch.save_file(tensors, file), then penstock.manifest(file)",
    "start_loading": "penstock.modules.load_in_background(model, uri)",
    "status": "penstock.hub.status()",
    "why": "penstock.hub.why(name)",
}
"""Names that people look for in `penstock`, and what they need instead: they are in the AttributeError."""

SPI = {
    "ADAPTERS": "penstock.spi.engine_weights",
    "Arena": "penstock.memory.arena",
    "Around": "penstock.sync.receive.hooks",
    "Closeable": "penstock.lifecycle",
    "ControlConnection": "penstock.http.control",
    "Declarable": "penstock.sync.shards",
    "Digester": "penstock.sync.digester",
    "FleetOptions": "penstock.spi.engine_weights",
    "Header": "penstock.storage.safetensors",
    "HostPlugin": "penstock.spi.host_plugin",
    "INDEX_SUFFIX": "penstock.storage.locate",
    "Stragglers": "penstock.sync.together",
    "LoadFunction": "penstock.sync.recording.layout:Load",
    "Log": "penstock.logs",
    "LoraMerge": "penstock.jobs.operations.lora",
    "MIN_CHUNK_BYTES": "penstock.loader.session",
    "MalformedAnswer": "penstock.http.control",
    "Memory": "penstock.transport.protocol",
    "MemoryDigests": "penstock.sync.memory_digests",
    "NOT_USABLE": "penstock.cache.attached",
    "NetworkFile": "penstock.storage.network_files",
    "RankInfo": "penstock.spi.engine_weights",
    "ReadOptions": "penstock.loader.session",
    "OutputSet": "penstock.storage.output",
    "Phases": "penstock.phases",
    "Placed": "penstock.sync.placed",
    "ProgressOption": "penstock.loader.progress",
    "PublishMode": "penstock.sync.report",
    "VersionReceiver": "penstock.spi.received",
    "Recipe": "penstock.plan.tasks",
    "RegisteredStorages": "penstock.transport.storages",
    "Requirements": "penstock.sync.recording.requirements",
    "SUFFIX": "penstock.storage.locate",
    "SafeSlice": "penstock.loader.safe_open",
    "LoadSession": "penstock.loader.session",
    "Settings": "penstock.config",
    "ShardRow": "penstock.sync.shards",
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
    "TrainerPublisher": "penstock.spi.sender",
    "WholeTensorShares": "penstock.spi.sender",
    "bytes_text": "penstock.report",
    "checkpoint": "penstock.spi.engine_weights",
    "connection_of": "penstock.spi.connection",
    "copy_other_files": "penstock.fetcher.storage_initializer",
    "declared_shards": "penstock.sync.shards:declared",
    "deferred": "penstock.lifecycle",
    "display": "penstock.storage.locate",
    "download_files": "penstock.storage.download:download",
    "dtype_of": "penstock.loader.tensor",
    "extras_named": "penstock.entry_points",
    "group_of_all": "penstock.spi.received",
    "install_hint": "penstock.entry_points",
    "is_remote": "penstock.storage",
    "kernels_ready": "penstock.spi.sleep_kernels",
    "lay_out_tensors": "penstock.plan.tasks:lay_out",
    "layout": "penstock.sync.recording",
    "release_after_fork": "penstock.lifecycle",
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
    "patch_once": "penstock.spi.host_plugin",
    "path_inside": "penstock.storage.download:inside",
    "pinned_uri": "penstock.storage:pinned",
    "private_directory": "penstock.net.unix_sockets",
    "read_header": "penstock.storage.safetensors",
    "read_object": "penstock.storage.foreign_json",
    "read_options": "penstock.spi.engine_weights",
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


def lazily(
    module: str,
    table: Mapping[str, str],
    *,
    submodules: Collection[str] = (),
    guesses: Mapping[str, str] | None = None,
) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module whose names are in a table.

    Args:
        module: name of the module, for the error.
        table: name -> the module that defines it, or `module:name`.
        submodules: modules below it that can be used as attributes without an import.
        guesses: names that people look for in vain -> what they need instead.
    """

    def resolve(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{module}.{name}")
        if name not in table:
            instead = (guesses or {}).get(name)
            hint = f"; use {instead}" if instead else ""
            raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)
        place, _, there = table[name].partition(":")
        # Rooms import torch at their head. Here, and not in each verb, a missing package becomes MissingExtra.
        with extras_named():
            return getattr(importlib.import_module(place), there or name)

    return resolve
