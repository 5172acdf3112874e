"""Our routes from the server's own list, new routes included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.server import Server
from sglang_inflight.frontend.http.routes import TAG


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    # JSON schema of the body; empty for a GET
    schema: dict[str, Any]

    def call(self, server: Server, body: Any, **kwargs: Any) -> dict[str, Any]:
        ask = server.get if self.method == "GET" else server.post
        arguments = () if self.method == "GET" else (body,)
        answer: dict[str, Any] = ask(self.path, *arguments, **kwargs)
        return answer


def routes(server: Server, headers: dict[str, str] | None = None) -> list[Route]:
    described = server.get("/openapi.json", headers=headers or server.headers)
    found = [
        Route(method.upper(), path, _schema(operation))
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
        if TAG in operation.get("tags", [])
    ]
    # an empty list would let every test over the routes pass
    assert {"/pause_generation", "/inflight/status"} <= {route.path for route in found}
    return found


def _schema(operation: dict[str, Any]) -> dict[str, Any]:
    body = operation.get("requestBody", {"content": {}})["content"]
    schema: dict[str, Any] = body["application/json"]["schema"] if body else {}
    return schema
