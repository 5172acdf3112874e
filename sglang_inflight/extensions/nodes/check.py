"""Refuses nodes that differ, before a server's first step.

All nodes of a server must run the same SGLang Inflight. A node without SGLang Inflight, or with
other patches, would not answer our calls, or would swap its weights in another step. So the error
names the node, and no node starts.

This module hooks ``Scheduler.init_ipc_channels``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from time import monotonic

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import _get_default_store

import sglang_inflight
from sglang_inflight.hooking import BEFORE, SCHEDULER, hook
from sglang_inflight.livepatch import load_series
from sglang_inflight.settings import PREFIX, kinds, read
from sglang_inflight.sglang_types import get_parallel
from sglang_inflight.unsupported import Unsupported

logger = logging.getLogger(__name__)

# All ranks leave the same rendezvous, so ranks with SGLang Inflight get here within moments.
WAIT_S = 60.0
_KEY = "sglang-inflight/{rank}"

Account = Mapping[str, str]


@hook(f"{SCHEDULER}.init_ipc_channels", BEFORE)
def check_nodes_match(scheduler: object, *args: object, **kwargs: object) -> None:
    """Compare the code and settings of all nodes. Raise ``Unsupported`` if a node differs.

    This runs right after the rendezvous, before steps of different length on each node.
    A silent node also raises. The ranks compare through the store of their rendezvous: a
    collective would hang on a node without SGLang Inflight.
    """
    parallel = get_parallel()
    if parallel.nnodes == 1:
        return
    group, store = parallel.world_group, _get_default_store()
    here = describe_this_node()
    store.set(_KEY.format(rank=group.rank), json.dumps(here))
    until = monotonic() + WAIT_S
    ranks_of_a_node = group.world_size // parallel.nnodes
    # accounts by node; None: the node did not answer
    accounts: dict[int, Account | None] = {}
    for rank in group.ranks:
        key, node = _KEY.format(rank=rank), rank // ranks_of_a_node
        try:
            store.wait([key], timedelta(seconds=max(0.1, until - monotonic())))
            account: Account | None = json.loads(store.get(key))
        except DistStoreError:
            account = None
        if accounts.get(node, here) is not None:
            accounts[node] = account
    if (sentence := find_difference(accounts)) is not None:
        logger.critical("%s", sentence)
        raise Unsupported(sentence)


def describe_this_node() -> dict[str, str]:
    """Return the versions and settings that must be the same on every node."""
    shared = {
        PREFIX + each.name.upper(): str(getattr(settings, each.name))
        for settings in map(read, kinds())
        for each in fields(settings)
        if each.metadata["is_shared"]
    }
    house = Path(sglang_inflight.__file__).parent
    files = [*sorted(house.rglob("*.py")), *sorted(load_series().folder.glob("*.patch"))]
    code = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    return {
        "sglang": version("sglang"),
        "sglang-inflight": f"{version('sglang-inflight')} ({code[:12]})",
        **shared,
    }


def find_difference(accounts: Mapping[int, Account | None]) -> str | None:
    """Return an error text about silent nodes, or about a node unlike the first, or None."""
    silent = [f"node {node}" for node, account in accounts.items() if account is None]
    if silent:
        return (
            f"{' and '.join(silent)} did not report SGLang Inflight within {WAIT_S:g} s: install "
            "the same sglang-inflight on every node, let SGLANG_PLUGINS load it, and use the same "
            "settings"
        )
    first, reference = next(iter(accounts.items()))
    for node, account in accounts.items():
        for name, value in (reference or {}).items():
            if account is not None and account.get(name) != value:
                return (
                    f"{name} is {value} on node {first} and {account.get(name)} on node {node}: "
                    "all nodes of a server need the same"
                )
    return None
