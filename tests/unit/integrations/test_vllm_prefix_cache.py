"""Requests are salted by the version of the weights that they are computed with, and by what their client says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.integrations.vllm_prefix_cache import salt_of, salt_requests


class Request:
    """What of vLLM's request matters: block hashes that its salt goes into."""

    def __init__(self, salt: str | None, num_computed_tokens: int = 0) -> None:
        self.cache_salt, self.num_computed_tokens = salt, num_computed_tokens
        self.block_hashes: list[str] = []
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        self.block_hashes.append(f"block of {self.cache_salt}")


def make_core(backend: str | None) -> Any:
    """A class like vLLM's engine core, salting, and one of it."""

    class Core:
        def __init__(self) -> None:
            config = None if backend is None else SimpleNamespace(backend=backend)
            self.vllm_config = SimpleNamespace(weight_transfer_config=config)
            self.scheduler = SimpleNamespace(requests={})
            self.version = "default"

        def preprocess_add_request(self, request: Any) -> Any:
            return Request(request.cache_salt), 0

        def add_request(self, request: Any, request_wave: int = 0) -> None:
            self.scheduler.requests[id(request)] = request

        def set_weight_version(self, weight_version: str) -> None:
            self.version = weight_version

        def get_weight_version(self) -> str:
            return self.version

    salt_requests(Core, "penstock")
    salt_requests(Core, "penstock")
    return Core()


def asked(core: Any, salt: str | None) -> Request:
    made, _ = core.preprocess_add_request(SimpleNamespace(cache_salt=salt))
    assert isinstance(made, Request)
    return made


def test_a_version_and_a_client_each_have_their_own_salt() -> None:
    salts = {salt_of(own, version) for own in (None, "a", "b") for version in ("1", "2")}
    assert len(salts) == 6
    assert salt_of(salt_of("a", "1"), "2") == salt_of("a", "2")


def test_requests_follow_the_version_until_they_are_computed() -> None:
    core = make_core("penstock")
    waiting, running, late = asked(core, "a"), asked(core, None), asked(core, None)
    core.add_request(waiting)
    core.add_request(running, 0)
    running.num_computed_tokens = 16
    old = running.cache_salt
    core.set_weight_version("2")
    core.add_request(late)  # made before the version, added after
    assert waiting.cache_salt == salt_of("a", "2")
    assert late.cache_salt == salt_of(None, "2")
    assert running.cache_salt == old == salt_of(None, "default")
    for request in (waiting, late, running):
        assert request.block_hashes == [f"block of {request.cache_salt}"]


def test_engines_with_other_backends_are_left_alone() -> None:
    for backend in (None, "nccl"):
        core = make_core(backend)
        one = asked(core, "a")
        core.add_request(one)
        core.set_weight_version("2")
        assert one.cache_salt == "a"
