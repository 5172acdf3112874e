"""A trainer's rendezvous as vLLM's, up to NCCL's part."""

from __future__ import annotations

import ctypes
import pickle
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

TIMEOUT = timedelta(seconds=300)


class ncclUniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


@dataclass
class StatelessGroup:
    """The part of a communicator that TRL clears at its end."""

    store: TCPStore | None
    socket: socket.socket | None


class Communicator:
    """Rank 0 of a group with the server's ranks."""

    def __init__(self, host: str, port: int, world_size: int) -> None:
        listening = socket.create_server((host, port))
        store = TCPStore(
            host,
            port,
            world_size,
            is_master=True,
            timeout=TIMEOUT,
            use_libuv=False,
            master_listen_fd=listening.detach(),
        )
        # nobody unpickles the structure
        store.set("broadcast_from/0/0", pickle.dumps(ncclUniqueId()))  # type: ignore[arg-type]
        self.group = StatelessGroup(store, None)
        in_torch: Any = store
        # torch prefixes a group's keys with its name, and a backend's with its device
        for prefix in (f"tcp://{host}:{port}", "weight_update_group/", "cpu/"):
            in_torch = PrefixStore(prefix, in_torch)
        self._gloo: Any = ProcessGroupGloo(in_torch, 0, world_size, TIMEOUT)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._gloo.broadcast(tensor, 0).wait()


def trainer_init(init_info: dict[str, Any]) -> Communicator:
    return Communicator(
        init_info["master_address"], init_info["master_port"], init_info["world_size"]
    )
