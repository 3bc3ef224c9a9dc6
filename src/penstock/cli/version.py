"""`penstock version`: which Penstock, on which Python, with which torch.

In: nothing. Out: versions. Not here: devices and limits (`doctor`).
"""

from __future__ import annotations

from penstock.cli.options import Format, FormatOption
from penstock.cli.output import write_fields, write_json


def version(format: FormatOption = Format.human) -> None:
    """Print the versions that a bug report needs."""
    import platform

    from penstock.cli.installed import package_version

    found = {
        "penstock": package_version("penstock"),
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "safetensors": package_version("safetensors"),
        "platform": platform.platform(),
    }
    if format is Format.json:
        write_json(found)
    else:
        write_fields({name: value or "not installed" for name, value in found.items()})
