"""Clients written for vLLM, against our server."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Sequence
from typing import Any

import httpx

from harness import marker
from harness.server import PLAIN, Server
from harness.trainer import Trainer, layout
from sglang_inflight.client.async_client import LIMITS
from tests.support.load import ENDLESS, PATIENCE_S, Output, prompt, until

# small, so that the marker model fills several buckets
BUCKET_BYTES = 30_000

ROUTES = {
    "/pause": "POST",
    "/resume": "POST",
    "/abort_requests": "POST",
    "/init_weight_transfer_engine": "POST",
    "/shutdown_weight_transfer_engine": "POST",
    "/start_weight_update": "POST",
    "/start_draft_weight_update": "POST",
    "/update_weights": "POST",
    "/finish_weight_update": "POST",
    "/weight_info": "GET",
    "/weight_checker": "POST",
    "/get_world_size": "GET",
    "/reset_prefix_cache": "POST",
    "/reset_mm_cache": "POST",
    "/reset_encoder_cache": "POST",
    "/sleep": "POST",
    "/wake_up": "POST",
    "/is_sleeping": "GET",
    "/release_kv_cache_memory": "POST",
    "/collective_rpc": "POST",
    "/v1/load_lora_adapter": "POST",
    "/skyrl/v1/load_lora_adapter": "POST",
    "/v1/unload_lora_adapter": "POST",
}


class VLLMClient:
    """A vLLM trainer's calls, in vLLM's own terms."""

    def __init__(self, server: Server) -> None:
        self._http = httpx.Client(
            base_url=server.url,
            headers=server.headers,
            timeout=120,
            limits=LIMITS,
            **PLAIN,
        )

    def post(self, path: str, json: Any = None, **params: Any) -> Any:
        return self._read(self._http.post(path, json=json, params=params))

    def get(self, path: str, **params: Any) -> Any:
        return self._read(self._http.get(path, params=params))

    def refuse(
        self, path: str, *words: str, status: int = 400, json: Any = None, **params: Any
    ) -> None:
        """Check that the call is refused with ``words`` in the message."""
        response = self._http.request(ROUTES.get(path, "POST"), path, json=json, params=params)
        assert response.status_code == status, response.text
        for word in words:
            assert word in response.json()["message"], response.text

    def init_weight_transfer_engine(
        self, trainer: Trainer, *, packed: bool, through_torch: bool = False
    ) -> None:
        """Join a group: the server within the call, the trainer beside it.

        The rendezvous is vLLM's, or that of ``torch.distributed`` if ``through_torch``.
        """
        world_size = 1 + self.get("/get_world_size")["world_size"]
        ours = {"rendezvous": "torch"} if through_torch else {}
        init_info = {
            **ours,
            "master_address": "127.0.0.1",
            "master_port": trainer.listen(ranks=world_size - 1, as_vllm=not through_torch),
            "rank_offset": 1,
            "world_size": world_size,
            "packed": packed,
            "packed_buffer_size_bytes": BUCKET_BYTES,
            "packed_num_buffers": 2,
        }
        try:
            self.post("/init_weight_transfer_engine", {"init_info": init_info})
        except BaseException:
            # the trainer waits for a server that does not come
            trainer.close()
            raise
        assert trainer.answer() == "joined"

    def shutdown_weight_transfer_engine(self, trainer: Trainer) -> None:
        trainer.order("leave", group="weight_update_group")
        self.post("/shutdown_weight_transfer_engine")
        assert trainer.answer() == "left"

    def send_weights(
        self,
        trainer: Trainer,
        version: int,
        *,
        packed: bool,
        name: str | None = None,
        says_packed: bool = False,
    ) -> None:
        """Send a whole version: the call receives while the trainer broadcasts."""
        self.post("/start_weight_update")
        info = update_info(version)
        if says_packed:
            info |= {"packed": packed, "packed_buffer_size_bytes": BUCKET_BYTES}
        calling = threading.Thread(
            target=self.post, args=("/update_weights", {"update_info": info})
        )
        calling.start()
        trainer.send(version, bucket=packed, bucket_bytes=BUCKET_BYTES if packed else None)
        assert trainer.answer() == "sent"
        calling.join()
        self.post("/finish_weight_update", None if name is None else {"weight_version": name})

    @staticmethod
    def _read(response: httpx.Response) -> Any:
        assert response.status_code == 200, response.text
        return response.json()


def update_info(version: int) -> dict[str, Any]:
    fields = layout(version)
    return {
        "names": fields["names"],
        "dtype_names": fields["dtypes"],
        "shapes": fields["shapes"],
    }


class Rollout:
    """A streaming request to ``/inference/v1/generate``, read by its own thread."""

    def __init__(self, server: Server, *, tokens: int | None, n: int = 1, **body: Any) -> None:
        self.request_id = f"rollout-{uuid.uuid4().hex}"
        self._server = server
        self._changed = threading.Condition()
        self._ended = False
        self._outputs = [Output() for _ in range(n)]
        self.logprobs: list[list[float]] = [[] for _ in range(n)]
        # events without a choice
        self.others: list[dict[str, Any]] = []
        sampling = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "n": n}
        self._body = {
            "request_id": self.request_id,
            "token_ids": prompt(),
            "stream": True,
            **body,
            "sampling_params": {**sampling, "logprobs": 0, **body.get("sampling_params", {})},
        }
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def tokens(self) -> list[int]:
        with self._changed:
            (output,) = self._outputs
            return [*output.tokens]

    @property
    def has_ended(self) -> bool:
        return self._ended

    def wait_for_tokens(self, count: int) -> None:
        """Wait until each output has ``count`` tokens."""
        with self._changed:
            reached = self._changed.wait_for(
                lambda: self._ended or all(len(o.tokens) >= count for o in self._outputs),
                PATIENCE_S,
            )
        assert reached, self._outputs
        assert not self._ended, (self._outputs, self.others)

    def outputs(self) -> list[Output]:
        """Wait for the end, and check each output's single end and its log-probabilities."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._ended, PATIENCE_S)
        for output, logprobs in zip(self._outputs, self.logprobs, strict=True):
            assert output.endings == 1, self.others
            assert len(logprobs) == len(output.tokens)
        return self._outputs

    def output(self) -> Output:
        (output,) = self.outputs()
        return output

    def abort(self) -> None:
        body = {"request_ids": [self.request_id]}
        assert self._server.post("/abort_requests", body)["aborted"] == 1

    def _read(self) -> None:
        url = self._server.url + "/inference/v1/generate"
        try:
            with httpx.stream("POST", url, json=self._body, timeout=280, **PLAIN) as response:
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if line.startswith("data: ") and data != "[DONE]":
                        self._take(json.loads(data))
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _take(self, event: dict[str, Any]) -> None:
        with self._changed:
            if not event.get("choices"):
                self.others.append(event)
            for choice in event.get("choices", ()):
                self._take_choice(choice)
            self._changed.notify_all()

    def _take_choice(self, choice: dict[str, Any]) -> None:
        output = self._outputs[choice["index"]]
        output.tokens = [*output.tokens, *choice["token_ids"]]
        content = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == choice["token_ids"]
        self.logprobs[choice["index"]] += [entry["logprob"] for entry in content]
        reason = choice["finish_reason"]
        spans = choice["weight_versions"]
        output.meta = {
            "finish_reason": {"type": reason} if reason else None,
            "weight_versions": spans,
            "completion_tokens": len(output.tokens),
        }
        output.chunks.append((len(output.tokens), spans))
        output.endings += reason is not None


def make_rollouts(server: Server, count: int) -> list[Rollout]:
    """Start endless streams, and wait for their first tokens."""
    rollouts = [Rollout(server, tokens=ENDLESS) for _ in range(count)]
    for rollout in rollouts:
        rollout.wait_for_tokens(3)
    return rollouts


def expect_versions_of(rollouts: Sequence[Rollout], versions: list[int]) -> None:
    """Wait for tokens of the last version on all running rollouts, and check their spans."""
    new = [marker.token(versions[-1])] * 3
    for rollout in rollouts:
        until("tokens of the new weights", lambda r=rollout: r.tokens[-3:] == new)  # type: ignore[misc]
        assert not rollout.has_ended
        rollout.abort()
        output = rollout.output()
        assert output.finish_reason == "abort"
        spans = output.meta["weight_versions"]
        assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans)][:-1]
        assert spans[-1]["end"] == len(output.tokens)
        made = [set(output.tokens[span["start"] : span["end"]]) for span in spans]
        assert made == [{marker.token(version)} for version in versions], (spans, made)
        assert len({span["epoch"] for span in spans}) == len(spans)
