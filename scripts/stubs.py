"""Writes stubs for the modules that import their names at first use, from the tables in `penstock.exports`.

The `.pyi` files are next to the modules. With `--check` nothing is written, and the exit code is 1 if a file differs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import penstock_compile_cache
import penstock_convert
from penstock import exports

CORE = Path(exports.__file__).parent
STUBS = {
    CORE / "__init__.pyi": (
        exports.PUBLIC,
        "".join(f"from penstock import {name} as {name}\n" for name in ("errors", *exports.MODULES))
        + "__version__: str\n",
    ),
    CORE / "spi" / "__init__.pyi": (exports.SPI, ""),
    **{
        Path(package.__file__).with_suffix(".pyi"): (package.TABLE, "TABLE: dict[str, str]\n")
        for package in (penstock_compile_cache, penstock_convert)
    },
    **{
        (CORE / name / "__init__.pyi" if (CORE / name).is_dir() else CORE / f"{name}.pyi"): (table, "")
        for name, table in exports.MODULES.items()
    },
}


def stub(table: Mapping[str, str], more: str) -> str:
    """Return the text of a stub, which imports each name from where it is defined."""
    lines = []
    for name, place in table.items():
        module, _, there = place.partition(":")
        lines.append(f"from {module} import {there or name} as {name}\n")
    names = "".join(f'    "{name}",\n' for name in table)
    return f"# Written by scripts/stubs.py.\n{''.join(sorted(lines))}{more}__all__: list[str] = [\n{names}]\n"


def main() -> int:
    """Write or check all stubs. Return the exit code."""
    wrong = 0
    for path, (table, more) in STUBS.items():
        text = stub(table, more)
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{path} does not agree with penstock.exports: run python scripts/stubs.py")
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main())
