# Written by scripts/stubs.py.
from penstock.config import ConnectionSettings as ConnectionSettings
from penstock.config import ReadSettings as ReadSettings
from penstock.errors import ConfigError as ConfigError
from penstock.errors import HubUnavailable as HubUnavailable
from penstock.errors import IntegrityError as IntegrityError
from penstock.errors import NotFound as NotFound
from penstock.errors import PenstockError as PenstockError
from penstock.errors import PlanError as PlanError
from penstock.errors import SourceError as SourceError
from penstock.errors import VersionRefused as VersionRefused
from penstock.fetcher.join import Fleet as Fleet
from penstock.fetcher.join import Variant as Variant
from penstock.fetcher.join import join as join
from penstock.fetcher.report import FetchReport as FetchReport
from penstock.loader.into import load_into as load_into
from penstock.loader.load import TensorStream as TensorStream
from penstock.loader.load import Weights as Weights
from penstock.loader.load import load as load
from penstock.loader.load import stream as stream
from penstock.loader.report import LoadReport as LoadReport
from penstock.loader.safe_open import load_file as load_file
from penstock.loader.safe_open import safe_open as safe_open
from penstock.loader.verify import inspect as inspect
from penstock.loader.verify import manifest as manifest
from penstock.loader.verify import verify as verify
from penstock.plan.tensor_parallel import tensor_parallel as tensor_parallel
from penstock.sync.publish.publisher import publisher as publisher
from penstock.sync.receive.hooks import Hooks as Hooks
from penstock.sync.receive.subscribe import subscriber as subscriber
from penstock.sync.report import PublishReport as PublishReport
from penstock.sync.report import UpdateReport as UpdateReport
from penstock.sync.shards import Shard as Shard
from penstock.types import Box as Box
from penstock.types import DType as DType
from penstock.types import Manifest as Manifest
from penstock_convert.convert import convert as convert
from penstock_convert.report import ConvertReport as ConvertReport
from penstock import errors as errors
from penstock import cache as cache
from penstock import hub as hub
from penstock import modules as modules
from penstock import reports as reports
from penstock import sync as sync
from penstock import telemetry as telemetry
__version__: str
__all__: list[str] = [
    "Box",
    "ConfigError",
    "ConnectionSettings",
    "ConvertReport",
    "DType",
    "FetchReport",
    "Fleet",
    "Hooks",
    "HubUnavailable",
    "IntegrityError",
    "LoadReport",
    "Manifest",
    "NotFound",
    "PenstockError",
    "PlanError",
    "PublishReport",
    "ReadSettings",
    "Shard",
    "SourceError",
    "TensorStream",
    "UpdateReport",
    "Variant",
    "VersionRefused",
    "Weights",
    "convert",
    "inspect",
    "join",
    "load",
    "load_file",
    "load_into",
    "manifest",
    "publisher",
    "safe_open",
    "stream",
    "subscriber",
    "tensor_parallel",
    "verify",
]
