"""The hub's OpenAPI document.

In: the operations. Out: a document whose schemas msgspec makes from the messages.
Not here: the operations (`operations`), the routes (`app`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from penstock.hub.auth import LIFE_HEADER, Auth
from penstock.hub.messages import Fault, MemberId, Word
from penstock.hub.operations import Operation

_REF = "#/components/schemas/{name}"


def document(operations: Iterable[Operation], faults: Mapping[int, str], auth: Auth) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document."""
    operations = tuple(operations)  # it is walked twice, and may be an iterator
    named = [kind for operation in operations for kind in (operation.takes, operation.gives) if kind is not None]
    _, components = msgspec.json.schema_components([*named, Fault], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation, faults)
    for path, about in (
        ("/healthz", "The process answers."),
        ("/readyz", "The store answers, too."),
        ("/metrics", "For Prometheus."),
    ):
        page = {"description": "text", "content": {"text/plain": {"schema": {"type": "string"}}}}
        get: dict[str, Any] = {"summary": about, "operationId": path[1:], "responses": {"200": page}}
        if path != "/healthz":
            get["responses"]["503"] = _fault(faults[503])
        if path == "/metrics":
            get["responses"]["401"] = _fault(faults[401])
        else:
            get["security"] = []
        paths[path] = {"get": get}
    openapi: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Penstock hub", "version": "1", "description": "Who holds what; never the bytes."},
        "paths": paths,
        "components": {"schemas": dict(components)},
    }
    if auth.token_file is not None:
        openapi["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        openapi["security"] = [{"token": []}]
    described: dict[str, Any] = _as_ecma(openapi)
    return described


def _as_ecma(value: Any) -> Any:
    r"""Write the ends of patterns as JSON Schema does: its `$` is Python's `\Z`, which no newline may follow."""
    if isinstance(value, dict):
        return {
            name: item.replace(r"\Z", "$") if name == "pattern" and isinstance(item, str) else _as_ecma(item)
            for name, item in value.items()
        }
    return [_as_ecma(item) for item in value] if isinstance(value, list) else value


def _described(operation: Operation, faults: Mapping[int, str]) -> dict[str, Any]:
    described: dict[str, Any] = {"operationId": operation.name, "summary": operation.about, "responses": {}}
    if operation.gives is None:
        described["responses"]["204"] = {"description": "done"}
    else:
        described["responses"]["200"] = {"description": "answered", **_json(operation.gives.__name__)}
    for status, what in faults.items():
        described["responses"][str(status)] = _fault(what)
    if operation.takes is not None:
        described["requestBody"] = {"required": True, **_json(operation.takes.__name__)}
    parameters: list[dict[str, Any]] = []
    if "{member}" in operation.path:
        schema = msgspec.json.schema(MemberId)
        parameters.append({"name": "member", "in": "path", "required": True, "schema": schema})
    if operation.name == "status":
        schema = msgspec.json.schema(Word)
        parameters.append({"name": "model", "in": "query", "required": False, "schema": schema})
    if operation.speaker is not None:
        about = "The secret that the member's id is the digest of."
        parameters.append(
            {"name": LIFE_HEADER, "in": "header", "required": True, "schema": {"type": "string"}, "description": about}
        )
    return described | ({"parameters": parameters} if parameters else {})


def _json(name: str) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": _REF.format(name=name)}}}}


def _fault(what: str) -> dict[str, Any]:
    return {"description": what, **_json("Fault")}
