"""A Ray actor loads us before it makes its scheduler (``--use-ray``, ``RayEngine``).

SGLang loads no plugins in Ray's actors. Ray unpickles an actor's arguments before it makes the
actor, and ``Installation``, an attribute of the argument ``port_args``, loads them when unpickled.
An error there fails the actor, and with it the server's start.

**Settings.** An actor has the environment of its node's Ray, and Ray outlives servers. The driver's
environment decides, because all processes of a server need the same settings, and the front end
runs in the driver. So ``Installation`` replaces every ``SGLANG_INFLIGHT_*`` of the actor.

**Nodes.** SGLang gives all actors of a server ``node_rank`` 0, so ``Installation`` says which node
the front end is on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_inflight.settings import PREFIX

logger = logging.getLogger(__name__)


class NotInstalled(RuntimeError):
    """An actor cannot run with us. Ray hands it to the driver as the cause of the actor's end."""


@dataclass(frozen=True)
class Installation:
    """Loads our plugin in the process that unpickles it.

    ``settings``: the driver's ``SGLANG_INFLIGHT_*``. ``account``: the driver's versions and
    settings, by ``describe_this_node``. ``node``: Ray's id of the driver's node. ``is_spread``:
    whether the server's bundles are on several nodes.
    """

    settings: Mapping[str, str]
    account: Mapping[str, str]
    node: str
    is_spread: bool

    def __reduce__(self) -> tuple[Callable[..., Installation], tuple[Any, ...]]:
        return install_in_actor, (
            dict(self.settings),
            dict(self.account),
            self.node,
            self.is_spread,
        )


def install_in_actor(
    settings: Mapping[str, str], account: Mapping[str, str], node: str, is_spread: bool
) -> Installation:
    """Install the driver's settings and our plugin. Raises ``NotInstalled`` with the reason."""
    here = f"on Ray's node {own_node()}"
    replace_settings(settings)
    from sglang.srt.plugins import load_plugins

    from sglang_inflight import plugin
    from sglang_inflight.extensions.nodes.check import describe_this_node
    from sglang_inflight.topology import Placement, set_placement_on_ray

    try:
        load_plugins()
        account_here = describe_this_node()
    except (Exception, SystemExit) as error:
        raise NotInstalled(f"SGLang Inflight cannot be installed {here}: {error}") from error
    if not plugin.is_installed():
        raise NotInstalled(
            f"SGLang has not loaded SGLang Inflight {here}: there SGLANG_PLUGINS "
            "leaves it out, or its installation failed as the actor's log says"
        )
    for name, value in account.items():
        if account_here.get(name) != value:
            raise NotInstalled(
                f"{name} is {value} in the driver, and {account_here.get(name)} {here}: all nodes "
                "of a server need the same"
            )
    set_placement_on_ray(Placement(is_spread, is_with_front_end=node == own_node()))
    return Installation(settings, account, node, is_spread)


def replace_settings(settings: Mapping[str, str]) -> None:
    """Replace this process's settings by the driver's, and name those of the node that differ."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        value = os.environ.pop(name)
        if settings.get(name) != value:
            logger.warning(
                "%s=%s of Ray's node is not used: the driver's settings are.", name, value
            )
    os.environ.update(settings)


def own_node() -> str:
    """Return Ray's id of this process's node."""
    import ray

    node: str = ray.get_runtime_context().get_node_id()
    return node
