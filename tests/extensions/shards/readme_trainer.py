"""Runs the README's sharded trainer: ``torchrun -m tests.extensions.shards.readme_trainer A B``.

``A`` and ``B`` are the servers. The trainer's model is the marker's, each tensor sharded by rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from harness import marker
from tests.support import readme


class Model:
    version = 0

    def named_parameters(self) -> Iterable[tuple[str, DTensor]]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for name, tensor in marker.tensors(self.version).items():
            yield name, distribute_tensor(tensor, mesh, [Shard(0)])


def train(model: Model) -> None:
    model.version += 1


def main() -> None:
    a, b = sys.argv[1:]
    dist.init_process_group("gloo")
    changes = {
        "http://a:30000": a,
        "http://b:30000": b,
        "range(43, 100)": "range(43, 45)",
    }
    exec(readme.code(" ShardSender(fleet)", changes), {"model": Model(), "train": train})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
