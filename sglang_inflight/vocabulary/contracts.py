"""Version contracts: which weights a request asks for.

A contract's fields stand in ``sampling_params.custom_params``, SGLang's place for fields it does
not know. So every route, ``Engine``, the front end and the schedulers find them there. The doors
fold fields at the top level of a body into that place. Imports no SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from sglang_inflight.vocabulary.bodies import (
    LONGEST_VERSION,
    LONGEST_WAIT_S,
    Body,
    Version,
    check_version,
)
from sglang_inflight.vocabulary.errors import Refused
from sglang_inflight.vocabulary.labels import AdapterLabel, VersionLabel

CUSTOM_PARAMS = "custom_params"
# another field in that place: the most commits that a request's first token may be behind
MAX_VERSION_LAG = "max_version_lag"

# a version that is a decimal integer, as text or as a number
Number = (
    Annotated[str, msgspec.Meta(pattern=rf"^[0-9]{{1,{LONGEST_VERSION}}}\Z")]
    | Annotated[int, msgspec.Meta(ge=0)]
)


class Contract(Body, kw_only=True, forbid_unknown_fields=False):
    """A request's demands on weights. None demands nothing.

    ``min_…`` and ``exact_…`` are about the first token. ``weight_version`` is about every token.
    """

    min_weight_version: Number | None = None
    exact_weight_version: Version | None = None
    min_epoch: Annotated[int, msgspec.Meta(ge=0)] | None = None
    min_adapter_version: Number | None = None
    exact_adapter_version: Version | None = None
    # the served version or the previous one
    weight_version: Version | None = None
    # seconds to wait at the door; None: the server's default
    version_timeout_s: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_WAIT_S)] | None = None

    def __post_init__(self) -> None:
        for name in (self.exact_weight_version, self.exact_adapter_version, self.weight_version):
            check_version(name)
        of_first = (self.min_weight_version, self.exact_weight_version, self.min_epoch)
        if self.weight_version is not None and of_first != (None, None, None):
            raise Refused(
                "weight_version names the weights of every token: leave out min_weight_version, "
                "exact_weight_version and min_epoch"
            )

    @property
    def is_about_adapter(self) -> bool:
        """Whether the contract needs a request with an adapter."""
        return self.min_adapter_version is not None or self.exact_adapter_version is not None

    def why_broken(self, served: VersionLabel) -> str | None:
        """Return why a first token by ``served`` breaks the contract; None if it keeps it."""
        if self.min_epoch is not None and served.epoch < self.min_epoch:
            return f"min_epoch is {self.min_epoch}, and {_say(served)} is served"
        return _why_not(
            "weight_version",
            self.min_weight_version,
            self.exact_weight_version,
            served.version,
            f"{_say(served)} is served",
        )

    def why_broken_by_adapter(self, served: AdapterLabel | None) -> str | None:
        """Return why a first token with this adapter breaks the contract, or None."""
        if not self.is_about_adapter:
            return None
        if served is None:
            return "the contract is about an adapter's version, and the request has no adapter"
        return _why_not(
            "adapter_version",
            self.min_adapter_version,
            self.exact_adapter_version,
            served.version,
            f"version {served.version!r} of the adapter {served.adapter!r} is served",
        )


def _say(served: VersionLabel) -> str:
    return f"version {served.version!r} (epoch {served.epoch})"


def _why_not(
    what: str, least: str | int | None, exact: str | None, version: str, is_served: str
) -> str | None:
    if exact is not None and version != exact:
        return f"exact_{what} is {exact!r}, and {is_served}"
    if least is None:
        return None
    if not (version.isascii() and version.isdecimal()):
        return f"min_{what} is {least}, and {is_served}, which is no decimal integer"
    if int(version) < int(least):
        return f"min_{what} is {least}, and {is_served}"
    return None


FIELDS = Contract.__struct_fields__
# the fields by their own names, for code that looks up one of them
WEIGHT_VERSION = "weight_version"
_EMPTY = Contract()


def custom_param(sampling_params: Any, name: str) -> Any:
    """Return the field ``name`` of a request's ``custom_params``; None if there is none."""
    custom = sampling_params.custom_params
    return custom.get(name) if isinstance(custom, dict) else None


def read_contract(custom_params: object) -> Contract | None:
    """Return the contract in a request's ``custom_params``; None if there is none.

    Raises ``Refused`` for a field of a wrong type or value.
    """
    if not isinstance(custom_params, dict) or custom_params.keys().isdisjoint(FIELDS):
        return None
    given = {name: custom_params[name] for name in FIELDS if name in custom_params}
    try:
        contract = msgspec.convert(given, Contract)
    except msgspec.ValidationError as error:
        raise Refused(f"bad version contract: {error}") from error
    return None if contract == _EMPTY else contract


def given_in(body: object) -> dict[str, Any]:
    """Return the contract's fields at the top level of a JSON body. Null is not given."""
    if not isinstance(body, Mapping):
        return {}
    return {name: body[name] for name in FIELDS if body.get(name) is not None}


def fold(given: Mapping[str, Any], custom_params: object) -> Any:
    """Return ``custom_params`` with the fields ``given`` at the top level of a body.

    Raises ``Refused`` if both have a field with different values.
    """
    if not given:
        return custom_params
    if custom_params is not None and not isinstance(custom_params, dict):
        raise Refused(
            f"{next(iter(given))} needs a {CUSTOM_PARAMS} that is an object, or none; got "
            f"{type(custom_params).__name__}"
        )
    folded = dict(custom_params or {})
    for name, value in given.items():
        inner = folded.get(name)
        if inner is not None and inner != value:
            raise Refused(
                f"{name} is {value!r} in the body and {inner!r} in {CUSTOM_PARAMS}: pass one"
            )
        folded[name] = value
    read_contract(folded)
    return folded


def fold_into_sampling(given: Mapping[str, Any], sampling_params: Any) -> Any:
    """Return sampling parameters, of one request or a list of a batch's, with ``given`` in each."""
    if not given:
        return sampling_params
    if isinstance(sampling_params, list):
        return [fold_into_sampling(given, each) for each in sampling_params]
    params = dict(sampling_params or {})
    return {**params, CUSTOM_PARAMS: fold(given, params.get(CUSTOM_PARAMS))}
