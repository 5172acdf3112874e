"""Do all nodes of a server run the same of us? Asked at start, before a rank relies on another.

A node without us, or with other patches, answers no call of ours, and swaps its weights in no
step, or in another one. So it is named, and no node starts.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from time import monotonic

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import _get_default_store

import sglang_inflight
from sglang_inflight.livepatch import load_series
from sglang_inflight.settings import PREFIX, Settings
from sglang_inflight.sglang_types.runtime_context import get_parallel
from sglang_inflight.unsupported import Unsupported

logger = logging.getLogger(__name__)

# All ranks come from the same rendezvous, so those that run us are here within moments.
WAIT_S = 60.0
_KEY = "sglang-inflight/{rank}"
# what ranks of a replica must not do differently, because they step together
_SHARED_SETTINGS = ("staging", "max_version_lag", "pd_mismatch", "require_update")

Account = Mapping[str, str]


def check_nodes_match() -> None:
    """Tell the ranks of other nodes what runs here, and hear what runs there.

    Through the store in which the ranks have just met, and not by a collective, which a node
    that does not run us would leave hanging. Raises ``Unsupported`` where a node is not heard
    of, or says something else.
    """
    parallel = get_parallel()
    if parallel.nnodes == 1:
        return
    group, store = parallel.world_group, _get_default_store()
    here = describe_this_node()
    store.set(_KEY.format(rank=group.rank), json.dumps(here))
    until = monotonic() + WAIT_S
    ranks_of_a_node = group.world_size // parallel.nnodes
    # by node; None is silence
    heard: dict[int, Account | None] = {}
    for rank in group.ranks:
        key, node = _KEY.format(rank=rank), rank // ranks_of_a_node
        try:
            store.wait([key], timedelta(seconds=max(0.1, until - monotonic())))
            account: Account | None = json.loads(store.get(key))
        except DistStoreError:
            account = None
        if heard.get(node, here) is not None:
            heard[node] = account
    if (sentence := find_difference(heard)) is not None:
        logger.critical("%s", sentence)
        raise Unsupported(sentence)


def describe_this_node() -> dict[str, str]:
    """What must be the same on every node."""
    settings = Settings.from_environment()
    house = Path(sglang_inflight.__file__).parent
    files = [*sorted(house.rglob("*.py")), *sorted(load_series().folder.glob("*.patch"))]
    code = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    return {
        "sglang": version("sglang"),
        "sglang-inflight": f"{version('sglang-inflight')} ({code[:12]})",
        **{PREFIX + name.upper(): str(getattr(settings, name)) for name in _SHARED_SETTINGS},
    }


def find_difference(heard: Mapping[int, Account | None]) -> str | None:
    """What is said of nodes that are silent, or not like the first one that is not."""
    silent = [f"node {node}" for node, account in heard.items() if account is None]
    if silent:
        return (
            f"{' and '.join(silent)} did not say within {WAIT_S:g} s that SGLang Inflight runs "
            "there: install the same sglang-inflight on every node, where SGLANG_PLUGINS lets it "
            "load, with the same settings"
        )
    first, reference = next(iter(heard.items()))
    for node, account in heard.items():
        for name, value in (reference or {}).items():
            if account is not None and account.get(name) != value:
                return (
                    f"{name} is {value} on node {first} and {account.get(name)} on node {node}: "
                    "all nodes of a server need the same"
                )
    return None
