# Written by scripts/stubs.py.
from penstock.arguments import require_name as require_name
from penstock.arguments import wrong as wrong_argument
from penstock.cache.attached import NOT_USABLE as NOT_USABLE
from penstock.cli.terminal import examples as command_examples
from penstock.config import Settings as Settings
from penstock.config import ecosystem as environment_with_prefix
from penstock.config import parse_bytes as parse_bytes
from penstock.digest.strip import Strips as Strips
from penstock.entry_points import extras_named as extras_named
from penstock.entry_points import install_hint as install_hint
from penstock.entry_points import require_package as require_package
from penstock.fetcher.storage_initializer import copy_other_files as copy_other_files
from penstock.holding.digester import Digester as Digester
from penstock.holding.weight_layout import revision_of as revision_of
from penstock.holding.weight_layout import tabulate as tabulate
from penstock.http.control import ControlConnection as ControlConnection
from penstock.http.control import MalformedAnswer as MalformedAnswer
from penstock.http.control import over_tcp as over_tcp
from penstock.interrupts import deferred as deferred
from penstock.lifecycle import Closeable as Closeable
from penstock.lifecycle import release_after_fork as release_after_fork
from penstock.loader.load import open_stream as open_stream
from penstock.loader.progress import ProgressOption as ProgressOption
from penstock.loader.safe_open import ENGINE_CUDA_BYTES as ENGINE_CUDA_BYTES
from penstock.loader.safe_open import SafeSlice as SafeSlice
from penstock.loader.session import LoadSession as LoadSession
from penstock.loader.session import MIN_CHUNK_BYTES as MIN_CHUNK_BYTES
from penstock.loader.session import ReadOptions as ReadOptions
from penstock.loader.session import resolve_device as resolve_device
from penstock.loader.shared_files import SharedFile as SharedFile
from penstock.loader.shared_files import SharedFiles as SharedFiles
from penstock.loader.shared_read import SharedReadReport as SharedReadReport
from penstock.loader.tensor import dtype_of as dtype_of
from penstock.loader.tensor import torch_dtype as torch_dtype
from penstock.loader.tensor import torch_shape as torch_shape
from penstock.logs import Log as Log
from penstock.logs import log_named as log_named
from penstock.memory.arena import Arena as Arena
from penstock.memory.arena import needed_bytes as needed_bytes
from penstock.net.unix_sockets import private_directory as private_directory
from penstock.phases import Phases as Phases
from penstock.ranks.agreement import reason_of as reason_of
from penstock.ranks.agreement import reasons_of as reasons_of
from penstock.report import Summarised as Summarised
from penstock.report import bytes_text as bytes_text
from penstock.spi.connection import connection_of as connection_of
from penstock.spi.engine_weights import ADAPTERS as ADAPTERS
from penstock.spi.engine_weights import FleetOptions as FleetOptions
from penstock.spi.engine_weights import RankInfo as RankInfo
from penstock.spi.engine_weights import checkpoint as checkpoint
from penstock.spi.engine_weights import prepare_checkpoint as prepare_checkpoint
from penstock.spi.engine_weights import read_options as read_options
from penstock.spi.host_plugin import HostPlugin as HostPlugin
from penstock.spi.host_plugin import patch_once as patch_once
from penstock.spi.sleep_kernels import kernels_ready as kernels_ready
from penstock.spi.trainer_publisher import TrainerPublisher as TrainerPublisher
from penstock.spi.trainer_publisher import WholeTensorShares as WholeTensorShares
from penstock.spi.version_receiver import VersionReceiver as VersionReceiver
from penstock.storage import Source as Source
from penstock.storage import is_remote as is_remote
from penstock.storage import list_uris as list_uris
from penstock.storage import local_path as local_path
from penstock.storage import open_source as open_source
from penstock.storage import pinned as pinned_uri
from penstock.storage import read_small as read_small
from penstock.storage import text_of as text_of
from penstock.storage import timed as timed_source
from penstock.storage.download import download as download_files
from penstock.storage.download import inside as path_inside
from penstock.storage.foreign_json import read_object as read_object
from penstock.storage.foreign_json import write_object as write_object
from penstock.storage.hugging_face import typed_error as typed_error_of_hub
from penstock.storage.locate import display as display
from penstock.storage.locate import model_name as model_name
from penstock.storage.locate import texts_of as texts_of
from penstock.storage.network_files import NetworkFile as NetworkFile
from penstock.storage.network_files import network_file_system as network_file_system
from penstock.storage.output import OutputSet as OutputSet
from penstock.storage.repository import parse as parse_repository
from penstock.storage.safetensors import Header as Header
from penstock.storage.safetensors import read_header as read_header
from penstock.storage.weight_set import open_weights as open_weights
from penstock.storage.write import typed as typed_errors_of_writing
from penstock.sync.commit.ballot import Ballot as Ballot
from penstock.sync.commit.ballot import Stragglers as Stragglers
from penstock.sync.memory_digests import MemoryDigests as MemoryDigests
from penstock.sync.placed import Placed as Placed
from penstock.sync.publish.registered import require_same as require_same
from penstock.sync.publish.transformed import Transforms as Transforms
from penstock.sync.receive.hooks import Around as Around
from penstock.sync.receive.target import Target as Target
from penstock.sync.recording import layout as layout
from penstock.sync.recording.layout import Load as LoadFunction
from penstock.sync.recording.requirements import Requirements as Requirements
from penstock.sync.recording.requirements import record as record
from penstock.sync.report import PublishMode as PublishMode
from penstock.sync.report import UpdateMode as UpdateMode
from penstock.sync.shards import Declarable as Declarable
from penstock.sync.shards import ShardRow as ShardRow
from penstock.sync.shards import declared as declared_shards
from penstock.sync.shards import regions_of as regions_of
from penstock.sync.shards import unwrapped as unwrapped
from penstock.transport.protocol import Memory as Memory
from penstock.transport.storages import RegisteredStorages as RegisteredStorages
from penstock.types import TensorTable as TensorTable
from penstock.waits import Threads as Threads
__all__: list[str] = [
    "HostPlugin",
    "patch_once",
    "read_options",
    "connection_of",
    "Log",
    "log_named",
    "Phases",
    "Settings",
    "checkpoint",
    "reason_of",
    "reasons_of",
    "prepare_checkpoint",
    "RankInfo",
    "FleetOptions",
    "VersionReceiver",
    "TrainerPublisher",
    "WholeTensorShares",
    "Ballot",
    "Stragglers",
    "PublishMode",
    "UpdateMode",
    "MemoryDigests",
    "kernels_ready",
    "copy_other_files",
    "display",
    "environment_with_prefix",
    "is_remote",
    "list_uris",
    "local_path",
    "model_name",
    "parse_repository",
    "pinned_uri",
    "read_small",
    "text_of",
    "texts_of",
    "open_weights",
    "open_source",
    "Source",
    "timed_source",
    "Header",
    "read_header",
    "TensorTable",
    "revision_of",
    "NetworkFile",
    "network_file_system",
    "LoadSession",
    "MIN_CHUNK_BYTES",
    "ProgressOption",
    "ReadOptions",
    "SafeSlice",
    "ENGINE_CUDA_BYTES",
    "SharedFile",
    "SharedFiles",
    "SharedReadReport",
    "open_stream",
    "resolve_device",
    "dtype_of",
    "torch_dtype",
    "torch_shape",
    "tabulate",
    "Arena",
    "needed_bytes",
    "Memory",
    "RegisteredStorages",
    "Digester",
    "Strips",
    "Around",
    "Declarable",
    "Placed",
    "ShardRow",
    "Target",
    "Transforms",
    "declared_shards",
    "regions_of",
    "require_same",
    "unwrapped",
    "LoadFunction",
    "Requirements",
    "layout",
    "record",
    "ADAPTERS",
    "OutputSet",
    "read_object",
    "write_object",
    "private_directory",
    "ControlConnection",
    "MalformedAnswer",
    "over_tcp",
    "command_examples",
    "Closeable",
    "Summarised",
    "Threads",
    "bytes_text",
    "deferred",
    "parse_bytes",
    "release_after_fork",
    "require_name",
    "wrong_argument",
    "NOT_USABLE",
    "download_files",
    "extras_named",
    "install_hint",
    "path_inside",
    "require_package",
    "typed_error_of_hub",
    "typed_errors_of_writing",
]
