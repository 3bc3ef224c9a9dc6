"""The routes of a vLLM server that an RL loop calls: samples with their log-probabilities, and new weights.

`transformers_server` has the same routes.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

GONE = (OSError, http.client.HTTPException)
"""Errors of a request if the server is not running or ends during the request."""


class Refused(Exception):
    """The server answered with an error, and the text gives the reason."""


class Client:
    """The routes of one server."""

    def __init__(self, url: str, sync_name: str) -> None:
        self._url, self._sync_name = url, sync_name

    def request(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = 300.0) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}{path}", data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            raise Refused(f"{path}: {error.code} {error.read().decode(errors='replace')[:2000]}") from error

    def wait_up(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.request("/weight_info", timeout_s=5.0)
                return
            except GONE:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def weight_version(self) -> str:
        version: str = self.request("/weight_info")["weight_version"]
        return version

    def sample(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        """Return a completion for each prompt, and the log-probabilities of its tokens."""
        body = {"model": "policy", "prompt": prompts, "max_tokens": num_tokens, "temperature": 1.0, "logprobs": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
        choices = sorted(self.request("/v1/completions", body)["choices"], key=lambda choice: choice["index"])
        tokens = [choice["token_ids"] for choice in choices]
        return tokens, [choice["logprobs"]["token_logprobs"] for choice in choices]

    # -- with Penstock: the version is received while the server serves, and then installed

    def subscribe(self) -> None:
        self.request("/init_weight_transfer_engine", {"init_info": {"name": self._sync_name, "stall_s": 30.0}})

    def receive(self, version: int) -> None:
        self.request("/start_weight_update", {})
        self.request("/update_weights", {"update_info": {"version": version}})

    def install(self, version: int) -> float:
        """Install the received version, and return the seconds of the pause."""
        return self._paused(lambda: self.request("/finish_weight_update", {"weight_version": str(version)}))

    # -- with vLLM alone: a checkpoint in a directory

    def reload(self, directory: Path, version: int) -> float:
        """Make the server read a checkpoint, and return the seconds of the pause."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        pause_s = self._paused(lambda: self.request("/collective_rpc", call))
        self.request("/update_weight_version", {"new_version": str(version)})
        return pause_s

    def _paused(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        self.request("/pause?mode=abort", {})
        work()
        self.request("/resume", {})
        return time.perf_counter() - began
