"""Authentication of callers at the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.hub.auth import Caller
from penstock_hub.auth import Auth

TOKEN = "a-token-of-16-letters"
OTHER = "another-token-of-llama"


@pytest.fixture
def auth(tmp_path: Path) -> Auth:
    file = tmp_path / "tokens"
    file.write_text(f"# all models\n{TOKEN}\n\n{OTHER} llama-* gpt2  # some\n")
    return Auth.of(token_file=file)


def test_token_limits_caller_to_its_models(auth) -> None:
    assert auth.guards
    every = auth.caller(f"Bearer {TOKEN}")
    assert every is not None and every.models is None
    some = auth.caller(f"bearer {OTHER}")
    assert some is not None and some.models == ("llama-*", "gpt2")
    assert some.name != every.name and TOKEN not in every.name
    assert some.may_ask(["llama-3", "gpt2"]) and not some.may_ask(["llama-3", "qwen"]) and not some.may_ask([""])
    assert Caller().may_ask(["anything"])


@pytest.mark.parametrize(
    "shown", ["", "Bearer", "Bearer ", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer é\udcff"]
)
def test_unknown_token_is_rejected(auth, shown) -> None:
    assert auth.caller(shown) is None


def test_missing_token_file_allows_everyone() -> None:
    assert Auth().caller("") == Caller(is_operator=True) and not Auth().guards


@pytest.mark.parametrize("text", ["", "# nothing\n", "short\n", "spaces-are-patterns!but-not-this\n"])
def test_token_file_without_valid_token_is_rejected(tmp_path, text) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(ConfigError):
        Auth.of(token_file=file)


def test_incomplete_tls_settings_are_rejected(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot read token file"):
        Auth.of(token_file=tmp_path / "none")
    with pytest.raises(ConfigError, match="requires its private key"):
        Auth.of(certificate=tmp_path / "cert.pem")
    with pytest.raises(ConfigError, match="requires a certificate of the hub"):
        Auth.of(client_ca=tmp_path / "ca.pem")


def test_changed_token_file_is_reloaded(auth, tmp_path, caplog) -> None:
    file, third = tmp_path / "tokens", "a-third-token-of-some"
    assert auth.caller(f"Bearer {third}") is None
    file.write_text(f"{third}\n")
    assert auth.caller(f"Bearer {third}") is not None and auth.caller(f"Bearer {TOKEN}") is None
    replaced = tmp_path / "new"
    replaced.write_text(f"{TOKEN}\n")
    replaced.rename(file)
    assert auth.caller(f"Bearer {third}") is None and auth.caller(f"Bearer {TOKEN}") is not None
    for fault in ("short\n", ""):
        file.write_text(fault)
        assert auth.caller(f"Bearer {TOKEN}") is not None and auth.guards
    file.unlink()
    assert auth.caller(f"Bearer {TOKEN}") is not None and auth.caller("") is None
    assert caplog.text.count("The tokens read before stay valid") == 3
