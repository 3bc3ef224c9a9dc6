"""A small Hugging Face hub on loopback with signed URLs that expire and injected faults, for tests and demos.

    /api/models/org/name[/revision/REVISION]   commit and files, with sizes and digests
    /org/name/resolve/REVISION/FILE            302 to the storage with a signature, or 307 to a small file
    storage: /SHA256?expires=SECONDS           ranges; 403 after the time

Set `HF_ENDPOINT` to `HuggingFaceServer.url`. It records every request. It sends Xet's headers but has no Xet servers,
uploads or web pages. Source of the responses: huggingface_hub's client, and responses of huggingface.co in 2025 and
2026.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.servers.http_server import Faults, RangeServer, Request

LARGE = (".safetensors", ".bin", ".gguf", ".pt")
"""Endings of files that git does not store itself. They have a SHA-256 and separate servers."""
_API = re.compile(
    r"/api/(?P<kind>models|datasets|spaces)/(?P<name>[^/]+/[^/]+)(?:/(?P<what>revision|tree)/(?P<rev>[^/]+))?/?"
)
_RESOLVE = re.compile(r"/(?:(?P<kind>datasets|spaces)/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<rev>[^/]+)/(?P<path>.+)")
_SMALL = "/api/resolve-cache/"


class _Storage(RangeServer):
    """The servers for signed URLs. An expired URL is refused."""

    def saw(self, request: Request) -> Faults:
        """Record the request. See `RangeServer.saw`."""
        faults = super().saw(request)
        expires = parse_qs(urlsplit(request.path).query).get("expires", ["0"])[0]
        return Faults(status=403, error_code="AccessDenied") if float(expires) < time.time() else faults


class HuggingFaceServer:
    """Serves repositories while its `with` block runs.

    Args:
        repositories: maps `org/name` (datasets: `datasets/org/name`) to files by name, the content of `main`.
        token: token that requests for private and gated repositories need.
        private: repositories that requests without the token cannot see.
        gated: repositories that are listed, but whose files need the token.
        signed_s: seconds for which the URL in a redirect is valid.
        host: the address that it listens on. See `RangeServer`.

    Attributes:
        requests: `METHOD PATH` for all requests to the hub, without those to the storage.
        storage: the servers behind the redirects, with their `requests`, `num_bytes_sent` and settable `faults`.
        status: if set, the next `num_status` requests to the hub get this status.
        retry_after: sent with `status`.
    """

    handler: type[BaseHTTPRequestHandler]
    default_branch = "main"

    def __init__(
        self,
        repositories: Mapping[str, Mapping[str, bytes]],
        *,
        token: str = "",
        private: tuple[str, ...] = (),
        gated: tuple[str, ...] = (),
        signed_s: float = 3600.0,
        host: str = "127.0.0.1",
    ) -> None:
        self._host = host
        self._token = token
        self.private = private
        self.gated = gated
        self.signed_s = signed_s
        self._commits: dict[tuple[str, str], dict[str, bytes]] = {}
        self._heads: dict[str, dict[str, str]] = {}
        self.lock = threading.Lock()
        self.storage: RangeServer = _Storage({}, host=host)
        self.requests: list[str] = []
        self.status = 0
        self.num_status = 0
        self.retry_after = ""
        self.lists_names_only = False
        """Whether to list files without size and digest, as some mirrors do."""
        self._initial = repositories

    def __enter__(self) -> Self:
        self.storage.__enter__()
        for name, files in self._initial.items():
            self.commit(name, files)
        self._server = _Server((self._host, 0), self.handler)
        self._server.owner = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="hugging-face-server")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self.storage.__exit__(kind, error, at)

    @property
    def url(self) -> str:
        """Return `http://127.0.0.1:PORT`, or with another host, without a trailing slash."""
        return f"http://{self._host}:{self._server.server_address[1]}"

    @property
    def storage_url(self) -> str:
        """Return the address for redirects. It has a different host from `url`, as the real hub's storage does."""
        # huggingface_hub 1.x follows redirects within a host itself, and expects the hub's headers there.
        return self.storage.url.replace("//127.0.0.1:", "//localhost:")

    def commit(self, name: str, files: Mapping[str, bytes], *, branch: str = "") -> str:
        """Make `files` the whole content of a branch. Return the commit, which stays readable."""
        branch = branch or self.default_branch
        with self.lock:
            content = {path: sha256_of(data) for path, data in sorted(files.items())}
            sha = hashlib.sha1(
                json.dumps([name, content, len(self._commits)]).encode(), usedforsecurity=False
            ).hexdigest()
            self._commits[name, sha] = dict(files)
            self._heads.setdefault(name, {})[branch] = sha
        for path, data in files.items():
            if path.endswith(LARGE):
                self.storage.replace(sha256_of(data), data)
        return sha

    def files_of(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return the commit of a revision and its files, or None if it does not exist."""
        with self.lock:
            sha = self._heads.get(name, {}).get(revision, revision)
            files = self._commits.get((name, sha))
        return None if files is None else (sha, files)

    def refusal(self, name: str, authorization: str, *, is_file: bool) -> tuple[int, str, str] | None:
        """Return the status, code and message if this request may not see the repository, or None if it may."""
        may = bool(self._token) and authorization == f"Bearer {self._token}"
        if name not in self._heads or (name in self.private and not may):
            return 401 if not authorization else 404, "RepoNotFound", "Repository not found"
        if is_file and name in self.gated and not may:
            message = f"Access to model {name} is restricted."
            return 403 if authorization else 401, "GatedRepo", message
        return None

    def fault(self) -> int:
        """Return the injected status for this request, or 0 if there is none."""
        with self.lock:
            if not self.num_status:
                return 0
            self.num_status -= 1
            return self.status


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    owner: HuggingFaceServer

    def handle_error(self, request: object, client_address: object) -> None:
        """Do nothing, because clients may disconnect at any time."""


class HubHandler(BaseHTTPRequestHandler):
    """A handler that sends injected faults, or the response from `answer`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because `HuggingFaceServer.requests` is the log."""

    def do_GET(self) -> None:
        """Respond with a body."""
        self._answer()

    def do_HEAD(self) -> None:
        """Respond without a body."""
        self._answer()

    def _answer(self) -> None:
        hub = self.server.owner
        with hub.lock:
            hub.requests.append(f"{self.command} {self.path}")
        status = hub.fault()
        if status:
            self.send(status, {"Retry-After": hub.retry_after} if hub.retry_after else {})
        else:
            self.answer(hub)

    def answer(self, hub: HuggingFaceServer) -> None:
        """Send the response to this request."""
        raise NotImplementedError

    def send(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        """Send a response with a body of known length."""
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_range(self, data: bytes, headers: Mapping[str, str]) -> None:
        """Send the requested range of `data`, or all of it."""
        headers = {**headers, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self.send(200, headers, data)
            return
        start = int(asked[1])
        if start >= len(data):
            self.send(416, {**headers, "Content-Range": f"bytes */{len(data)}"})
            return
        piece = data[start : int(asked[2]) + 1 if asked[2] else None]
        self.send(206, {**headers, "Content-Range": f"bytes {start}-{start + len(piece) - 1}/{len(data)}"}, piece)


class _Handler(HubHandler):
    def answer(self, hub: HuggingFaceServer) -> None:
        """Send the response. See `HubHandler.answer`."""
        path = unquote(urlsplit(self.path).path.replace("%2F", "%252F"))
        if path.startswith(_SMALL):
            self._send_small(path.removeprefix(_SMALL))
        elif match := _API.fullmatch(path):
            self._send_listing(match)
        elif match := _RESOLVE.fullmatch(path):
            self._redirect(match)
        else:
            self.send(404, {"X-Error-Code": "EntryNotFound"})

    def _content(self, match: re.Match[str], *, is_file: bool) -> tuple[str, str, dict[str, bytes]] | None:
        """Return repository, commit and files, or None if a response was already sent."""
        kind = match["kind"] or "models"
        name = match["name"] if kind == "models" else f"{kind}/{match['name']}"
        refusal = self.server.owner.refusal(name, self.headers.get("Authorization", ""), is_file=is_file)
        if refusal:
            self.send(refusal[0], {"X-Error-Code": refusal[1], "X-Error-Message": refusal[2]})
            return None
        found = self.server.owner.files_of(name, unquote(match["rev"] or "main"))
        if found is None:
            self.send(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
            return None
        return (name, *found)

    def _send_listing(self, match: re.Match[str]) -> None:
        content = self._content(match, is_file=False)
        if content is None:
            return
        _, commit, files = content
        siblings = []
        for path, data in sorted(files.items()):
            entry: dict[str, object] = {"rfilename": path, "size": len(data), "blobId": _blob_id(data)}
            if path.endswith(LARGE):
                entry["lfs"] = {"sha256": sha256_of(data), "size": len(data), "pointerSize": 134}
            siblings.append({"rfilename": path} if self.server.owner.lists_names_only else entry)
        answer: object = {
            "id": match["name"], "modelId": match["name"], "sha": commit, "private": False, "gated": False,
            "tags": [], "siblings": siblings,
        }  # fmt: skip
        if match["what"] == "tree":
            answer = [
                {
                    "type": "file", "path": path, "size": len(data), "oid": _blob_id(data),
                    **({"lfs": {"oid": sha256_of(data), "size": len(data), "pointerSize": 134}}
                       if path.endswith(LARGE) else {}),
                }
                for path, data in sorted(files.items())
            ]  # fmt: skip
        self.send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _redirect(self, match: re.Match[str]) -> None:
        content = self._content(match, is_file=True)
        if content is None:
            return
        name, commit, files = content
        data = files.get(match["path"])
        headers = {"X-Repo-Commit": commit}
        if data is None:
            self.send(404, {**headers, "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
            return
        if not match["path"].endswith(LARGE):
            where = f"{_SMALL}{name}/{commit}/{match['path']}"
            self.send(307, {**headers, "Location": where, "ETag": f'"{_blob_id(data)}"'})
            return
        sha, hub = sha256_of(data), self.server.owner
        headers |= {
            "Location": f"{hub.storage_url}/{sha}?expires={time.time() + hub.signed_s}&Signature=secret",
            "X-Linked-Etag": f'"{sha}"',
            "X-Linked-Size": str(len(data)),
            # This link is for clients that use Xet. Others follow the redirect.
            "Link": f'<{hub.url}/api/models/{name}/xet-read-token/{commit}>; rel="xet-auth"',
        }
        self.send(302, headers)

    def _send_small(self, path: str) -> None:
        kind_parts = 3 if path.startswith(("datasets/", "spaces/")) else 2
        parts = path.split("/", kind_parts + 1)
        name, commit, file = "/".join(parts[:kind_parts]), parts[kind_parts], parts[kind_parts + 1]
        found = self.server.owner.files_of(name, commit)
        if found is None or file not in found[1]:
            self.send(404, {})
            return
        data = found[1][file]
        self.send_range(data, {"ETag": f'"{_blob_id(data)}"', "X-Repo-Commit": commit})


HuggingFaceServer.handler = _Handler


# Cached, because a client must not wait for digests that a real hub has stored.
@functools.lru_cache
def sha256_of(data: bytes) -> str:
    """Return the hub's digest of a large file."""
    return hashlib.sha256(data).hexdigest()


@functools.lru_cache
def _blob_id(data: bytes) -> str:
    """Return git's name for a content. Source: git-hash-object(1)."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
