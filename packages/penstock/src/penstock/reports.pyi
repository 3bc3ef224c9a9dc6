# Written by scripts/stubs.py.
from penstock.loader.verify import InspectReport as InspectReport
from penstock.loader.verify import ManifestReport as ManifestReport
from penstock.loader.verify import VerifyReport as VerifyReport
__all__: list[str] = [
    "InspectReport",
    "ManifestReport",
    "VerifyReport",
]
