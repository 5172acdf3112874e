"""Links of a fixed rate between processes of one machine: each process has a network of its own.

A network namespace has one interface, and a virtual cable to a bridge. Both ends of the cable are
held to the rate, so a process sends and receives at most so fast, whatever the others do. The
bridge is in a namespace of its own, too, into which this process moves. No namespace has a name:
the kernel removes them with their last process, even one that was killed, and nothing outside them
is changed. No namespace has a default route: look-ups of names fail at once, and none waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

# a process's interface has this name in its namespace
INTERFACE = "eth0"
# frames as in a data centre: headers are below 1 % of the bytes
FRAME_BYTES = 9000
# longest burst beyond the rate; it holds the largest piece that TCP hands to an interface
BURST_BYTES = 256 << 10
QUEUE_MS = 50
_BRIDGE = "bridge0"
_NETWORK = "10.77.0"
# the bridge's own address, for calls of this process
_BRIDGE_NUMBER = 254
_CLONE_NEWNET = 0x40000000  # of Linux; Python has a name for it from 3.12 on

_libc = ctypes.CDLL(None, use_errno=True)


class NoLinks(Exception):
    """This machine, or this user, cannot make such links."""


@dataclass(frozen=True)
class Link:
    """The interface of one process."""

    address: str
    # the other end of its cable, at the bridge
    _port: str
    _namespace: int

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Have this thread be in the namespace. Processes that it starts are there for good."""
        own = _own_namespace()
        try:
            _enter(self._namespace)
            yield
        finally:
            _enter(own)
            os.close(own)

    def carried(self) -> tuple[int, int]:
        """Return how many bytes the process has sent and received, with headers.

        Only the threads of ``links`` can see this end.
        """
        (found,) = json.loads(_run("ip", "-json", "-stats", "link", "show", "dev", self._port))
        counted = found["stats64"]
        return counted["rx"]["bytes"], counted["tx"]["bytes"]


@contextlib.contextmanager
def links(count: int, bytes_per_s: float) -> Iterator[list[Link]]:
    """Make links, and have this thread be at their bridge. Raises ``NoLinks``.

    The thread and those that it starts see nothing of the machine's network meanwhile.
    """
    _require_tools()
    namespaces = [_own_namespace()]
    try:
        namespaces.append(_new_namespace())
        _make_bridge()
        made = []
        for number in range(1, count + 1):
            namespaces.append(_away(namespaces[1]))
            made.append(_make_link(number, namespaces[-1], bytes_per_s))
        yield made
    finally:
        _enter(namespaces[0])
        for namespace in namespaces:
            os.close(namespace)


def _require_tools() -> None:
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise NoLinks(f"links need {' and '.join(missing)} (Debian's iproute2), not found here")
    if os.geteuid() != 0:
        raise NoLinks("links need root, which alone makes network namespaces")


def _make_bridge() -> None:
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", _BRIDGE, "mtu", f"{FRAME_BYTES}", "type", "bridge")
    _run("ip", "address", "add", f"{_NETWORK}.{_BRIDGE_NUMBER}/24", "dev", _BRIDGE)
    _run("ip", "link", "set", _BRIDGE, "up")


def _make_link(number: int, namespace: int, bytes_per_s: float) -> Link:
    port, mtu = f"port{number}", ("mtu", f"{FRAME_BYTES}")
    link = Link(f"{_NETWORK}.{number}", port, namespace)
    other = ("peer", "name", INTERFACE, *mtu, "netns", f"/proc/{os.getpid()}/fd/{namespace}")
    _run("ip", "link", "add", port, *mtu, "type", "veth", *other)
    _run("ip", "link", "set", port, "master", _BRIDGE, "up")
    _limit(port, bytes_per_s)
    with link.inside():
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "address", "add", f"{link.address}/24", "dev", INTERFACE)
        _run("ip", "link", "set", INTERFACE, "up")
        _limit(INTERFACE, bytes_per_s)
    return link


def _limit(interface: str, bytes_per_s: float) -> None:
    rate = ("rate", f"{round(8 * bytes_per_s)}bit", "burst", f"{BURST_BYTES}b")
    _run("tc", "qdisc", "add", "dev", interface, "root", "tbf", *rate, "latency", f"{QUEUE_MS}ms")


def _own_namespace() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _new_namespace() -> int:
    """Move this thread into a new namespace, and return it."""
    if _libc.unshare(_CLONE_NEWNET) != 0:
        why = os.strerror(ctypes.get_errno())
        raise NoLinks(f"links need network namespaces, and the kernel makes none: {why}")
    return _own_namespace()


def _away(home: int) -> int:
    """Return a new namespace, and stay in ``home``."""
    try:
        return _new_namespace()
    finally:
        _enter(home)


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "a network namespace cannot be entered")


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise NoLinks(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
