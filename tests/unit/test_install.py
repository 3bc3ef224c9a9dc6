"""The installer of the test environments derives uv's variables from pip's configuration."""

from __future__ import annotations

import runpy
from pathlib import Path

INSTALL = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "install.py"))


def test_install_hint_uses_pip_configuration() -> None:
    listing = """:env:.cert='/certs/of-the-environment.crt'
:env:.disable-pip-version-check='1'
:env:.find-links='/wheels /more'
global.cert='/certs/global.crt'
global.extra-index-url='\\nhttps://one.example/simple\\nhttps://two.example/simple'
global.index-url='https://index.example/simple'
install.constraint='caps.txt'
"""
    assert INSTALL["settings"](listing) == {
        "SSL_CERT_FILE": "/certs/of-the-environment.crt",
        "UV_CONSTRAINT": "caps.txt",
        "UV_DEFAULT_INDEX": "https://index.example/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
    }


def test_empty_pip_configuration_sets_nothing() -> None:
    assert INSTALL["settings"]("") == {}
