# Written by scripts/stubs.py.
from penstock.config import ConnectionSettings as ConnectionSettings
from penstock.errors import BaseMismatch as BaseMismatch
from penstock.errors import BudgetTooSmall as BudgetTooSmall
from penstock.errors import Cancelled as Cancelled
from penstock.errors import ConfigError as ConfigError
from penstock.errors import DestinationError as DestinationError
from penstock.errors import DeviceOutOfMemory as DeviceOutOfMemory
from penstock.errors import DiskFull as DiskFull
from penstock.errors import FormatError as FormatError
from penstock.errors import GrantRefused as GrantRefused
from penstock.errors import HubUnavailable as HubUnavailable
from penstock.errors import IntegrityError as IntegrityError
from penstock.errors import MissingExtra as MissingExtra
from penstock.errors import NotFound as NotFound
from penstock.errors import OperationFailed as OperationFailed
from penstock.errors import PeerLost as PeerLost
from penstock.errors import PenstockError as PenstockError
from penstock.errors import PermissionDenied as PermissionDenied
from penstock.errors import PlanError as PlanError
from penstock.errors import SourceBusy as SourceBusy
from penstock.errors import SourceChanged as SourceChanged
from penstock.errors import SourceError as SourceError
from penstock.errors import SourceStalled as SourceStalled
from penstock.errors import SourceTruncated as SourceTruncated
from penstock.errors import SourceUnavailable as SourceUnavailable
from penstock.errors import StaleDescriptor as StaleDescriptor
from penstock.errors import UnknownMember as UnknownMember
from penstock.errors import UnsafeFormat as UnsafeFormat
from penstock.errors import VersionNotLive as VersionNotLive
from penstock.errors import VersionRefused as VersionRefused
from penstock.fetch.join import Fleet as Fleet
from penstock.fetch.join import Variant as Variant
from penstock.fetch.join import join as join
from penstock.fetch.report import FetchReport as FetchReport
from penstock.hub.client import drain as drain
from penstock.hub.client import status as status
from penstock.hub.client import why as why
from penstock.hub.job_reporter import HubReporter as HubReporter
from penstock.jobs.convert import WorkerSettings as WorkerSettings
from penstock.jobs.convert import convert as convert
from penstock.jobs.report import ConvertReport as ConvertReport
from penstock.keeper.attach import Attached as Attached
from penstock.keeper.attach import AttachReport as AttachReport
from penstock.keeper.attach import attach as attach
from penstock.keeper.hand_over import hand_over as hand_over
from penstock.keeper.keeper import Keeper as Keeper
from penstock.loader.emptied import Emptied as Emptied
from penstock.loader.emptied import empty_module as empty_module
from penstock.loader.into import load_into as load_into
from penstock.loader.load import TensorStream as TensorStream
from penstock.loader.load import Weights as Weights
from penstock.loader.load import load as load
from penstock.loader.load import stream as stream
from penstock.loader.report import LoadReport as LoadReport
from penstock.loader.safe_open import load_file as load_file
from penstock.loader.safe_open import safe_open as safe_open
from penstock.loader.start import Loading as Loading
from penstock.loader.start import start_loading as start_loading
from penstock.loader.verify import InspectReport as InspectReport
from penstock.loader.verify import ManifestReport as ManifestReport
from penstock.loader.verify import VerifyReport as VerifyReport
from penstock.loader.verify import inspect as inspect
from penstock.loader.verify import manifest as manifest
from penstock.loader.verify import verify as verify
from penstock.phases import phase as phase
from penstock.plan.tensor_parallel import tensor_parallel as tensor_parallel
from penstock.sync.check import StagedVersion as StagedVersion
from penstock.sync.check import log_prob_check as log_prob_check
from penstock.sync.publish.publisher import Publisher as Publisher
from penstock.sync.publish.publisher import publisher as publisher
from penstock.sync.receive.hooks import Hooks as Hooks
from penstock.sync.receive.released import StoredVersion as StoredVersion
from penstock.sync.receive.subscribe import subscriber as subscriber
from penstock.sync.receive.subscriber import Subscriber as Subscriber
from penstock.sync.report import PublishReport as PublishReport
from penstock.sync.report import UpdateReport as UpdateReport
from penstock.sync.shards import Shard as Shard
from penstock.telemetry.endpoint import MetricsEndpoint as MetricsEndpoint
from penstock.telemetry.endpoint import serve_metrics as serve_metrics
from penstock.types import Box as Box
from penstock.types import DType as DType
from penstock.types import Manifest as Manifest

__version__: str
__all__: list[str] = [
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
