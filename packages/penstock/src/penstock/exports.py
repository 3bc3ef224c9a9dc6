"""The public names of this package and of the interface for adapters, with the place where each name is defined.

`penstock`, its public modules and `penstock.spi` import a name when it is first used, because torch takes seconds to
import and `penstock inspect`, `hub` and `status` do not need it. Type checkers read the stubs (`.pyi`), which
scripts/stubs.py writes from the same tables.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from penstock.entry_points import extras_named
from penstock.lifecycle import paused_gc

PUBLIC = {
    "Box": "penstock.types",
    "ConfigError": "penstock.errors",
    "ConnectionSettings": "penstock.config",
    "ConvertReport": "penstock_convert.report",
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
    "ReadSettings": "penstock.config",
    "Shard": "penstock.sync.shards",
    "SourceError": "penstock.errors",
    "TensorStream": "penstock.loader.load",
    "UpdateReport": "penstock.sync.report",
    "Variant": "penstock.fetcher.join",
    "VersionRefused": "penstock.errors",
    "Weights": "penstock.loader.load",
    "convert": "penstock_convert.convert",
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
"""For each name in `penstock`, the module that defines it."""

MODULES = {
    "cache": {
        "AttachReport": "penstock.cache.attached",
        "Attached": "penstock.cache.attached",
        "WeightCache": "penstock.cache.weight_cache",
        "attach": "penstock.cache.attached",
        "cache_parameters": "penstock.cache.engine_parameters",
    },
    "hub": {
        "drain": "penstock.hub.client",
        "status": "penstock.hub.client",
        "why": "penstock.hub.client",
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
        "PublisherSettings": "penstock.sync.settings",
        "StagedVersion": "penstock.sync.check",
        "StoredVersion": "penstock.sync.receive.released",
        "Subscriber": "penstock.sync.receive.subscriber",
        "SubscriberSettings": "penstock.sync.settings",
    },
    "telemetry": {
        "MetricsEndpoint": "penstock.telemetry.endpoint",
        "phase": "penstock.phases",
        "serve_metrics": "penstock.telemetry.endpoint",
    },
}
"""For each public module below `penstock`, its names with the modules that define them. Errors are in
`penstock.errors`."""

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
"""Names that users may expect in `penstock`, with the alternative that the AttributeError mentions."""

SPI = {
    # Support for an engine's plug-in, its options and its log.
    "HostPlugin": "penstock.spi.host_plugin",
    "patch_once": "penstock.spi.host_plugin",
    "read_options": "penstock.spi.engine_weights",
    "connection_of": "penstock.spi.connection",
    "Log": "penstock.logs",
    "log_named": "penstock.logs",
    "Phases": "penstock.phases",
    "Settings": "penstock.config",
    # An engine's weights from a cache, a fleet or storage.
    "checkpoint": "penstock.spi.engine_weights",
    "reason_of": "penstock.ranks.agreement",
    "reasons_of": "penstock.ranks.agreement",
    "prepare_checkpoint": "penstock.spi.engine_weights",
    "RankInfo": "penstock.spi.engine_weights",
    "FleetOptions": "penstock.spi.engine_weights",
    # Receiving versions in an engine that loads whole tensors by name, and publishing versions from a trainer's rank.
    "VersionReceiver": "penstock.spi.version_receiver",
    "TrainerPublisher": "penstock.spi.trainer_publisher",
    "WholeTensorShares": "penstock.spi.trainer_publisher",
    "Ballot": "penstock.sync.commit.ballot",
    "Stragglers": "penstock.sync.commit.ballot",
    "PublishMode": "penstock.sync.report",
    "UpdateMode": "penstock.sync.report",
    # Digests of weights in memory, for engines that free their GPU memory while they sleep.
    "MemoryDigests": "penstock.sync.memory_digests",
    "kernels_ready": "penstock.spi.sleep_kernels",
    # URIs and other files of a model.
    "copy_other_files": "penstock.fetcher.storage_initializer",
    "display": "penstock.storage.locate",
    "environment_with_prefix": "penstock.config:ecosystem",
    "is_remote": "penstock.storage",
    "list_uris": "penstock.storage",
    "local_path": "penstock.storage",
    "model_name": "penstock.storage.locate",
    "parse_repository": "penstock.storage.repository:parse",
    "pinned_uri": "penstock.storage:pinned",
    "read_small": "penstock.storage",
    "text_of": "penstock.storage",
    "texts_of": "penstock.storage.locate",
    # Reading a checkpoint from its headers.
    "open_weights": "penstock.storage.weight_set",
    "open_source": "penstock.storage",
    "Source": "penstock.storage",
    "timed_source": "penstock.storage:timed",
    "Header": "penstock.storage.safetensors",
    "read_header": "penstock.storage.safetensors",
    "TensorTable": "penstock.types",
    "revision_of": "penstock.holding.weight_layout",
    "NetworkFile": "penstock.storage.network_files",
    "network_file_system": "penstock.storage.network_files",
    # Streams, slices, and reads shared by ranks.
    "LoadSession": "penstock.loader.session",
    "MIN_CHUNK_BYTES": "penstock.loader.session",
    "ProgressOption": "penstock.loader.progress",
    "ReadOptions": "penstock.loader.session",
    "SafeSlice": "penstock.loader.safe_open",
    "ENGINE_CUDA_BYTES": "penstock.loader.safe_open",
    "SharedFile": "penstock.loader.shared_files",
    "SharedFiles": "penstock.loader.shared_files",
    "SharedReadReport": "penstock.loader.shared_read",
    "open_stream": "penstock.loader.load",
    "resolve_device": "penstock.loader.session",
    # Dtypes, shapes and layouts of tensors.
    "dtype_of": "penstock.loader.tensor",
    "torch_dtype": "penstock.loader.tensor",
    "torch_shape": "penstock.loader.tensor",
    "tabulate": "penstock.holding.weight_layout",
    # Memory and copies of a target.
    "Arena": "penstock.memory.arena",
    "needed_bytes": "penstock.memory.arena",
    "Memory": "penstock.transport.protocol",
    "RegisteredStorages": "penstock.transport.storages",
    "Digester": "penstock.holding.digester",
    "Strips": "penstock.digest.strip",
    # A sync's tensors, and their declaration by a rank.
    "Around": "penstock.sync.receive.hooks",
    "Declarable": "penstock.sync.shards",
    "Placed": "penstock.sync.placed",
    "ShardRow": "penstock.sync.shards",
    "Target": "penstock.sync.receive.target",
    "Transforms": "penstock.sync.publish.transformed",
    "declared_shards": "penstock.sync.shards:declared",
    "regions_of": "penstock.sync.shards",
    "require_same": "penstock.sync.publish.registered",
    "unwrapped": "penstock.sync.shards",
    # Recordings of a model's own loader.
    "LoadFunction": "penstock.sync.recording.layout:Load",
    "Requirements": "penstock.sync.recording.requirements",
    "layout": "penstock.sync.recording",
    "record": "penstock.sync.recording.requirements",
    # LoRA adapters.
    "ADAPTERS": "penstock.spi.engine_weights",
    "OutputSet": "penstock.storage.output",
    "read_object": "penstock.storage.foreign_json",
    "write_object": "penstock.storage.foreign_json",
    "private_directory": "penstock.net.unix_sockets",
    # Requests to another process.
    "ControlConnection": "penstock.http.control",
    "MalformedAnswer": "penstock.http.control",
    "over_tcp": "penstock.http.control",
    # Commands of `penstock` that a package adds.
    "command_examples": "penstock.cli.terminal:examples",
    # Lifetimes of objects, threads, arguments, texts of reports.
    "Closeable": "penstock.lifecycle",
    "Summarised": "penstock.report",
    "Threads": "penstock.waits",
    "bytes_text": "penstock.report",
    "deferred": "penstock.interrupts",
    "parse_bytes": "penstock.config",
    "release_after_fork": "penstock.lifecycle",
    "require_name": "penstock.arguments",
    "wrong_argument": "penstock.arguments:wrong",
    # Packages that are not installed, and errors of other libraries.
    "NOT_USABLE": "penstock.cache.attached",
    "download_files": "penstock.storage.download:download",
    "extras_named": "penstock.entry_points",
    "install_hint": "penstock.entry_points",
    "path_inside": "penstock.storage.download:inside",
    "require_package": "penstock.entry_points",
    "typed_error_of_hub": "penstock.storage.hugging_face:typed_error",
    "typed_errors_of_writing": "penstock.storage.write:typed",
}
"""For each name in `penstock.spi`, the module that defines it, or `module:name` if the name differs there."""


def lazily(
    module: str,
    table: Mapping[str, str],
    *,
    submodules: Collection[str] = (),
    guesses: Mapping[str, str] | None = None,
) -> Callable[[str], Any]:
    """Return the `__getattr__` for a module with a table of names.

    Submodules can be used as attributes without an import. Guesses map names that users may try to the right names.
    """

    def resolve(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{module}.{name}")
        if name not in table:
            instead = (guesses or {}).get(name)
            hint = f"; use {instead}" if instead else ""
            raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)
        place, _, there = table[name].partition(":")
        # Modules import torch when they are loaded, so a missing package is reported here for all verbs.
        # A full collection of the garbage of a process with torch takes 40 to 80 ms, and imports cause one.
        with extras_named(), paused_gc():
            return getattr(importlib.import_module(place), there or name)

    return resolve
