"""Chooses the address at which other nodes reach a socket of the first node."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from sglang.srt.utils.network import NetworkAddress, get_local_ip_auto


@dataclass(frozen=True)
class Address:
    """``bound`` is the listening address, ``announced`` is the address for other nodes.

    An IPv6 address is in brackets, as in a URL.
    """

    bound: str
    announced: str
    is_ipv6: bool


def choose_address(dist_init_addr: str | None) -> Address:
    """Return the interface of the nodes' rendezvous, ``dist_init_addr``.

    Only this interface listens. Many machines resolve their own name to the loopback, while
    other nodes resolve it to another interface. In that case all interfaces listen.
    """
    if dist_init_addr is None:
        return _plain(get_local_ip_auto())
    meeting = NetworkAddress.parse(dist_init_addr)
    own = _own_address_towards(meeting.host, meeting.port)
    if ipaddress.ip_address(own).is_loopback and not _means_this_machine(meeting.host):
        is_ipv6 = ":" in own
        return Address("[::]" if is_ipv6 else "0.0.0.0", meeting.host, is_ipv6)
    return _plain(own)


def _plain(ip: str) -> Address:
    is_ipv6 = ":" in ip
    host = f"[{ip}]" if is_ipv6 else ip
    return Address(host, host, is_ipv6)


def _own_address_towards(host: str, port: int) -> str:
    """Return the source address of packets to ``host``. No packet is sent."""
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sender:
        sender.connect(where)
        own: str = sender.getsockname()[0]
    return own


def _means_this_machine(host: str) -> bool:
    """Return whether ``host`` means the loopback on every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
