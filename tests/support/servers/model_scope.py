"""A small ModelScope hub on loopback with signed URLs that expire and injected faults, for tests and demos.

    /api/v1/models/org/name/repo/files?Revision=            files, with sizes and digests
    /api/v1/datasets/org/name/repo/tree?Revision=&PageNumber=   the same in pages
    /api/v1/models/org/name/repo?Revision=&FilePath=        302 to the storage with a signature, or a small file itself

Set `MODELSCOPE_ENDPOINT` to `ModelScopeServer.url`. It has no uploads, accounts or web pages. Source of the responses:
the client modelscope_hub 0.5.
"""

from __future__ import annotations

import json
import re
import time
from urllib.parse import parse_qs, unquote, urlsplit

from tests.support.servers.hugging_face import LARGE, HubHandler, HuggingFaceServer, sha256_of

_PATH = re.compile(r"/api/v1/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)/repo(?P<what>/files|/tree)?")


class _Handler(HubHandler):
    def answer(self, hub: HuggingFaceServer) -> None:
        """Send the response. See `HubHandler.answer`."""
        place = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(place.query).items()}
        match = _PATH.fullmatch(unquote(place.path))
        if match is None:
            self._refuse(404, "not found")
            return
        name = match["name"] if match["kind"] == "models" else f"datasets/{match['name']}"
        refusal = hub.refusal(name, self.headers.get("Authorization", ""), is_file=not match["what"])
        found = hub.files_of(name, query.get("Revision", "master"))
        if refusal is not None:
            # It reports a private repository as missing, with or without a token.
            self._refuse(403 if refusal[1] == "GatedRepo" else 404, refusal[2])
        elif found is None:
            self._refuse(404, "no such revision")
        elif match["what"]:
            self._list(found[1], query)
        elif query.get("FilePath", "") not in found[1]:
            self._refuse(404, "no such file")
        else:
            self._file(hub, query["FilePath"], found[1][query["FilePath"]])

    def _list(self, files: dict[str, bytes], query: dict[str, str]) -> None:
        entries: list[dict[str, object]] = [
            {
                "Name": path.rpartition("/")[2], "Path": path, "Type": "blob", "Size": len(data),
                "Sha256": sha256_of(data), "IsLFS": path.endswith(LARGE),
            }
            for path, data in sorted(files.items())
        ]  # fmt: skip
        folders = {path.rpartition("/")[0] for path in files if "/" in path}
        entries += [{"Name": folder, "Path": folder, "Type": "tree", "Size": 0} for folder in sorted(folders)]
        if "PageNumber" in query:
            size = int(query["PageSize"])
            entries = entries[(int(query["PageNumber"]) - 1) * size :][:size]
        answer = {"Code": 200, "Success": True, "Data": {"Files": entries}}
        self.send(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def _file(self, hub: HuggingFaceServer, path: str, data: bytes) -> None:
        sha = sha256_of(data)
        if not path.endswith(LARGE):
            self.send_range(data, {"ETag": f'"{sha}"'})
            return
        expires = time.time() + hub.signed_s
        self.send(302, {"Location": f"{hub.storage.url}/{sha}?expires={expires}&Signature=secret"})

    def _refuse(self, status: int, message: str) -> None:
        answer = {"Code": 10010200000 + status, "Success": False, "Message": message}
        self.send(status, {"Content-Type": "application/json"}, json.dumps(answer).encode())


class ModelScopeServer(HuggingFaceServer):
    """Serves repositories as ModelScope does. See `HuggingFaceServer` for arguments and attributes."""

    handler = _Handler
    default_branch = "master"
