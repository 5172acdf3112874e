"""A trainer in a process of its own: rank 0 of a group, broadcasting marker weights.

``python -m harness.trainer`` reads one order a line on stdin and answers each with one line on
stdout, both JSON. ``Trainer`` is the test's side.

The process forms groups and fills buckets like SGLang's own clients, or like vLLM's, and unlike our
``Sender``: it stands for trainers that do not know this package.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import io
import json
import os
import pickle
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

from harness import marker
from harness.server import Server, free_port
from harness.starting import ROOT, end, start

FLATTENED_BUCKET = "flattened_bucket"
# with the glass card, trainers and servers are on cards, as on GPUs
BACKEND, DEVICE = ("glass", "glass") if hasattr(torch, "glass") else ("gloo", "cpu")


def layout(version: int, model: marker.Model = marker) -> dict[str, Any]:
    """Return ``names``, ``dtypes`` and ``shapes`` of the checkpoint of ``version``, for a body."""
    weights = model.tensors(version)
    return {
        "names": list(weights),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
        "shapes": [list(tensor.shape) for tensor in weights.values()],
    }


class Trainer:
    """The test's side of a trainer process. ``send`` only begins; ``answer`` waits for its end."""

    def __init__(self) -> None:
        self._is_up = False
        orders, to_trainer = os.pipe()
        from_trainer, answers = os.pipe()
        with open(orders) as reads, open(answers, "w") as output:
            self._process = start(
                ["-m", "harness.trainer"],
                reads=reads,
                output=output,
                errors=sys.__stderr__,
                cwd=ROOT,
            )
        self._orders, self._answers = os.fdopen(to_trainer, "w"), os.fdopen(from_trainer)

    def order(self, do: str, **details: Any) -> None:
        print(json.dumps({"do": do, **details}), file=self._orders, flush=True)

    def answer(self) -> Any:
        line = self._answers.readline()
        if not line:
            raise RuntimeError("the trainer ended")
        return json.loads(line)

    def join(
        self, server: Server, *, ranks: int = 1, group: str = "weight_update_group", **more: Any
    ) -> None:
        """Form ``group`` with the ``ranks`` ranks of ``server``."""
        port = self.listen(ranks=ranks, group=group)
        body = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + ranks,
            "group_name": group,
            "backend": BACKEND,
        }
        answered = server.post("/init_weights_update_group", {**body, **more})
        assert answered["status_code"] == 200, answered
        assert self.answer() == "joined"

    def listen(
        self, *, ranks: int = 1, group: str = "weight_update_group", as_vllm: bool = False
    ) -> int:
        """Begin to form ``group`` with ``ranks`` ranks, and return the port to join at.

        ``as_vllm`` exchanges an id in a store, in place of ``torch.distributed``.
        """
        self._wait_until_up()
        port = free_port()
        self.order("join", port=port, world_size=1 + ranks, group=group, as_vllm=as_vllm)
        return port

    def leave(self, server: Server, *, group: str = "weight_update_group") -> None:
        self.order("leave", group=group)
        assert self.answer() == "left"
        answered = server.post("/destroy_weights_update_group", {"group_name": group})
        assert answered["status_code"] == 200, answered

    @contextlib.contextmanager
    def group(self, server: Server, *, ranks: int = 1) -> Iterator[None]:
        """Form a group for the block. If the block fails, the trainer is killed."""
        self.join(server, ranks=ranks)
        try:
            yield
        except BaseException:
            # the trainer may hang in a broadcast that no rank receives
            self.close()
            server.post("/destroy_weights_update_group", {})
            raise
        self.leave(server)

    def send(
        self,
        version: int,
        *,
        model: marker.Model = marker,
        bucket: bool = False,
        bucket_bytes: int | None = None,
        count: int | None = None,
        group: str = "weight_update_group",
    ) -> None:
        """Begin to broadcast ``version``: all of it, or the first ``count`` tensors.

        Use one bucket, or several, each closed by the tensor that takes it beyond ``bucket_bytes``.
        """
        self.order(
            "send",
            version=version,
            model=model.__name__,
            bucket=bucket,
            bucket_bytes=bucket_bytes,
            count=count,
            group=group,
        )

    def send_tensors(
        self, weights: dict[str, torch.Tensor], *, group: str = "weight_update_group"
    ) -> None:
        """Begin to broadcast ``weights`` one by one."""
        content = io.BytesIO()
        torch.save([*weights.items()], content)
        named = base64.b64encode(content.getvalue()).decode()
        self.order("send_tensors", named=named, group=group)

    def reset(self) -> None:
        """Leave all groups, after a test that may have failed anywhere."""
        if self.is_alive:
            # once the server has left, a hanging broadcast fails, which ends the trainer
            with contextlib.suppress(RuntimeError, BrokenPipeError):
                self.order("leave", group="weight_update_group")
                self.answer()

    def _wait_until_up(self) -> None:
        if not self._is_up:
            assert self.answer() == "up"
            self._is_up = True

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Kill the trainer, so that ranks receiving its broadcast see a dead peer."""
        end(self._process)


class Trainers:
    """One trainer for many tests, replaced after its end."""

    def __init__(self) -> None:
        self._trainer = Trainer()

    def get(self) -> Trainer:
        if not self._trainer.is_alive:
            self._trainer = Trainer()
        return self._trainer

    def close(self) -> None:
        self._trainer.close()


# ---- the trainer process --------------------------------------------------------------

Named = list[tuple[str, torch.Tensor]]


def split(weights: Named, most: int | None) -> Iterator[Named]:
    """Split into parts, each ending with the tensor that takes it beyond ``most`` bytes."""
    part: Named = []
    for pair in weights:
        part.append(pair)
        if most is not None and sum(tensor.nbytes for _, tensor in part) > most:
            yield part
            part = []
    if part:
        yield part


def meet_as_vllm(port: int, *, world_size: int, group: str) -> torch.distributed.ProcessGroup:
    """Form a group like vLLM's ``StatelessProcessGroup`` and ``PyNcclCommunicator``.

    The trainer listens, keeps the store without libuv, waits in it for all ranks, and leaves NCCL's
    id there. NCCL's part that follows is replaced by gloo in the same store.
    """
    from sglang.srt.distributed.device_communicators.pynccl_wrapper import ncclUniqueId
    from sglang.srt.utils import init_custom_process_group
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    here = "127.0.0.1"
    listening = socket.create_server((here, port))
    store = TCPStore(
        here,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=300),
        use_libuv=False,
        master_listen_fd=listening.detach(),
    )
    # a ctypes structure, pickled by its class's name
    store.set("broadcast_from/0/0", pickle.dumps(ncclUniqueId()))  # type: ignore[arg-type]
    formed: torch.distributed.ProcessGroup = init_custom_process_group(
        backend="gloo",
        store=PrefixStore(f"tcp://{here}:{port}", store),
        world_size=world_size,
        rank=0,
        group_name=group,
    )
    return formed


def main() -> None:
    import torch.distributed as dist
    from sglang.srt.utils import init_custom_process_group
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    # stdout is for answers, so all other output goes to stderr
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    groups: dict[str, dist.ProcessGroup] = {}

    def broadcast(order: dict[str, Any]) -> str:
        model: marker.Model = importlib.import_module(order["model"])
        weights = list(model.tensors(order["version"]).items())[: order["count"]]
        group = groups[order["group"]]
        if order["bucket"]:
            for part in split(weights, order["bucket_bytes"]):
                bucket = FlattenedTensorBucket(named_tensors=part)
                dist.broadcast(bucket.get_flattened_tensor().to(DEVICE), src=0, group=group)
            return "sent"
        for _, tensor in weights:
            dist.broadcast(tensor.to(DEVICE), src=0, group=group)
        return "sent"

    def act(order: dict[str, Any]) -> str:
        if order["do"] == "join" and order["as_vllm"]:
            groups[order["group"]] = meet_as_vllm(
                order["port"], world_size=order["world_size"], group=order["group"]
            )
            return "joined"
        if order["do"] == "join":
            groups[order["group"]] = init_custom_process_group(
                backend=BACKEND,
                init_method=f"tcp://127.0.0.1:{order['port']}",
                world_size=order["world_size"],
                rank=0,
                group_name=order["group"],
            )
            return "joined"
        if order["do"] == "leave":
            if order["group"] in groups:
                dist.destroy_process_group(groups.pop(order["group"]))
            return "left"
        if order["do"] == "send_tensors":
            content = io.BytesIO(base64.b64decode(order["named"]))
            for _, tensor in torch.load(content):
                dist.broadcast(tensor.to(DEVICE), src=0, group=groups[order["group"]])
            return "sent"
        return broadcast(order)

    def tell(answer: str) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    torch.set_num_threads(1)
    tell("up")
    for line in sys.stdin:
        tell(act(json.loads(line)))


if __name__ == "__main__":
    main()
