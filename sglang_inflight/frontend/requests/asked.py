"""A request as every door describes it for the checks (``checks.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from sglang_inflight.vocabulary.contracts import CUSTOM_PARAMS


@dataclass(kw_only=True)
class Asked:
    """One call's request, of one prompt or of a batch. A check may set the last two fields."""

    # the route's own request
    request: Any
    # fields of the JSON body; none if the request came by gRPC or from Python
    body: Mapping[str, Any]
    # the caller's names of the prompts' requests
    names: list[str]
    # the body's field
    model: str | None = None
    # one for each prompt, or one for all; None if SGLang takes none with such a request
    adapters: list[str | None] | None
    # SGLang's field for values that it does not know, in the same form
    custom_params: list[Any] | None

    @classmethod
    def of(cls, obj: Any, body: Mapping[str, Any], model: str | None = None) -> Asked:
        """Describe a ``GenerateReqInput`` or an ``EmbeddingReqInput``."""
        sampling = as_list(getattr(obj, "sampling_params", None))
        return cls(
            request=obj,
            body=body,
            names=names_of(obj.rid),
            model=model,
            adapters=as_list(getattr(obj, "lora_path", None)),
            custom_params=[
                each.get(CUSTOM_PARAMS) if isinstance(each, dict) else None for each in sampling
            ],
        )

    def put_into(self, obj: Any) -> None:
        """Set what the checks have changed in a ``GenerateReqInput``."""
        assert self.adapters is not None
        assert self.custom_params is not None
        sampling = [
            given
            if custom is (given or {}).get(CUSTOM_PARAMS)
            else {**(given or {}), CUSTOM_PARAMS: custom}
            for given, custom in zip(as_list(obj.sampling_params), self.custom_params, strict=True)
        ]
        obj.sampling_params = sampling if isinstance(obj.sampling_params, list) else sampling[0]
        obj.lora_path = self.adapters if isinstance(obj.lora_path, list) else self.adapters[0]

    def prompts(self) -> Iterator[tuple[Any, str | None]]:
        """Return each prompt's ``custom_params`` and adapter."""
        custom, adapters = self.custom_params or [None], self.adapters or [None]
        count = max(len(custom), len(adapters))
        return zip(_spread(custom, count), _spread(adapters, count), strict=False)


async def read_body(request: Any) -> Mapping[str, Any]:
    """Return the fields of an HTTP request's body, parsed and cached by FastAPI.

    gRPC's requests have no body.
    """
    if not isinstance(request, Request):
        return {}
    if request.headers.get("content-type", "").startswith("multipart/form-data"):
        return await request.form()
    body = await request.json()
    return body if isinstance(body, Mapping) else {}


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def names_of(rid: object) -> list[str]:
    """Return the caller's names of a call's requests."""
    return [each for each in as_list(rid) if isinstance(each, str)]


def _spread(values: list[Any], count: int) -> list[Any]:
    return values * count if len(values) == 1 else values
