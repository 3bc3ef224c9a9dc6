# Written by scripts/stubs.py.
from penstock.cache.attached import AttachReport as AttachReport
from penstock.cache.attached import Attached as Attached
from penstock.cache.attached import attach as attach
from penstock.cache.engine_parameters import cache_parameters as cache_parameters
from penstock.cache.weight_cache import WeightCache as WeightCache
__all__: list[str] = [
    "AttachReport",
    "Attached",
    "WeightCache",
    "attach",
    "cache_parameters",
]
