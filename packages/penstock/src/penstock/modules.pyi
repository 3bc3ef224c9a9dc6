# Written by scripts/stubs.py.
from penstock.loader.start import BackgroundLoad as BackgroundLoad
from penstock.loader.start import load_in_background as load_in_background
__all__: list[str] = [
    "BackgroundLoad",
    "load_in_background",
]
