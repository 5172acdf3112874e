"""The compared servers: start, requests and pauses.

``ours`` is the patched SGLang. ``upstream`` is the same installation with only the reference
platform loaded, so the patches are the only difference. ``vllm`` runs from an environment of its
own, with its python in ``VLLM_PYTHON``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import httpx

from benchmarks.common.machine import VLLM_PYTHON
from examples.ending import exit_at_sigterm
from harness.server import free_port, serve
from harness.starting import make_zygotes, on_path

Kind = Literal["ours", "upstream", "vllm"]

START_TIMEOUT_S = 300
# a plugin that makes SGLang run on a CPU, and changes nothing else
REFERENCE = "inflight_reference"


class Peer(ABC):
    """A running server."""

    stream_path: ClassVar[str]
    resume_path: ClassVar[str]

    def __init__(self, kind: Kind, url: str, pid: int, log: Path) -> None:
        self.kind: Kind = kind
        self.url = url
        self.pid = pid
        self.log = log

    @classmethod
    @abstractmethod
    def pause_call(cls, mode: str | None = None) -> tuple[str, dict[str, Any]]:
        """Return the path and the body of a pause.

        ``mode`` is the server's name of it. None is the one that leaves running requests as they
        are.
        """

    @abstractmethod
    def body(self, prompt: list[int], max_tokens: int, *, stream: bool) -> dict[str, Any]:
        """Return a greedy request for exactly ``max_tokens`` tokens."""

    @abstractmethod
    def tokens_so_far(self, chunk: dict[str, Any]) -> int:
        """Return the request's number of tokens by this chunk of its answer."""

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=None)

    def halt(self) -> None:
        """Stop the server's processes, until ``going``."""
        os.killpg(self.pid, signal.SIGSTOP)

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        """Continue a halted server for the block, then halt it again."""
        os.killpg(self.pid, signal.SIGCONT)
        try:
            yield
        finally:
            self.halt()

    async def pause(self, client: httpx.AsyncClient) -> None:
        path, body = self.pause_call()
        (await client.post(path, json=body)).raise_for_status()

    async def resume(self, client: httpx.AsyncClient) -> None:
        (await client.post(self.resume_path, json={})).raise_for_status()


class SGLang(Peer):
    stream_path = "/generate"
    resume_path = "/continue_generation"

    @classmethod
    def pause_call(cls, mode: str | None = None) -> tuple[str, dict[str, Any]]:
        return "/pause_generation", {"mode": mode or "in_place"}

    def body(self, prompt: list[int], max_tokens: int, *, stream: bool) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        return {"input_ids": prompt, "sampling_params": sampling, "stream": stream}

    def tokens_so_far(self, chunk: dict[str, Any]) -> int:
        tokens: int = chunk["meta_info"]["completion_tokens"]
        return tokens


class VLLM(Peer):
    stream_path = "/v1/completions"
    resume_path = "/resume"

    @classmethod
    def pause_call(cls, mode: str | None = None) -> tuple[str, dict[str, Any]]:
        # versions before 0.32 recompute running requests in "keep" without clear_cache=false
        return f"/pause?mode={mode}" if mode else "/pause?mode=keep&clear_cache=false", {}

    def body(self, prompt: list[int], max_tokens: int, *, stream: bool) -> dict[str, Any]:
        usage = {"include_usage": True, "continuous_usage_stats": True}
        return {
            "model": "model",
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": stream,
            **({"stream_options": usage} if stream else {}),
        }

    def tokens_so_far(self, chunk: dict[str, Any]) -> int:
        tokens: int = chunk["usage"]["completion_tokens"]
        return tokens


CLASSES: dict[Kind, type[Peer]] = {"ours": SGLang, "upstream": SGLang, "vllm": VLLM}
# a note in a report without vLLM
NO_VLLM = f"vLLM was left out: {VLLM_PYTHON} is not set."


def has_vllm() -> bool:
    return VLLM_PYTHON in os.environ


def every_kind() -> list[Kind]:
    """Return ours, upstream, and vLLM if there is one."""
    return [kind for kind in CLASSES if kind != "vllm" or has_vllm()]


@contextlib.contextmanager
def start(
    kind: Kind,
    model: Path,
    *,
    chunk: int | None = None,
    flags: Sequence[str] = (),
    env: dict[str, str] | None = None,
    plugins: Path | None = None,
) -> Iterator[Peer]:
    """Start a server, and end it afterwards. ``chunk`` bounds the tokens of a prefill step.

    ``flags`` are SGLang's. ``plugins`` is a folder with more plugins, for upstream only.
    """
    _prepare()
    exit_at_sigterm()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        server = (
            _vllm(model, log, chunk)
            if kind == "vllm"
            else _sglang(kind, model, log, chunk, flags, env, plugins)
        )
        with server as peer:
            yield peer


@functools.cache
def _prepare() -> None:
    """Import SGLang once for each kind of server, and for both at once."""
    make_zygotes(_plugins_of("upstream", None))


@contextlib.contextmanager
def _sglang(
    kind: Kind,
    model: Path,
    log: Path,
    chunk: int | None,
    more: Sequence[str],
    env: dict[str, str] | None,
    plugins: Path | None,
) -> Iterator[Peer]:
    flags = ["--incremental-streaming-output", "--max-total-tokens", "32768", *more]
    if chunk is not None:
        flags += ["--chunked-prefill-size", str(chunk)]
    with serve(model, *flags, log=log, env={**_plugins_of(kind, plugins), **(env or {})}) as server:
        yield SGLang(kind, server.url, server.process.pid, log)


def _plugins_of(kind: Kind, folder: Path | None) -> dict[str, str]:
    if kind == "ours":
        return {}
    if folder is None:
        return {"SGLANG_PLUGINS": REFERENCE}
    names = [REFERENCE, *(file.stem for file in folder.glob("*.py"))]
    return {"SGLANG_PLUGINS": ",".join(names), **on_path(folder)}


@contextlib.contextmanager
def _vllm(model: Path, log: Path, chunk: int | None) -> Iterator[Peer]:
    port = free_port()
    command = [
        os.environ[VLLM_PYTHON], "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--served-model-name", "model",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16",
        "--enforce-eager", "--gpu-memory-utilization", "0.1",
        "--max-num-seqs", "64",
        *(["--max-num-batched-tokens", str(chunk)] if chunk is not None else []),
    ]  # fmt: skip
    # the pause routes exist in this mode only
    env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with log.open("wb") as sink:
        # it is in our session, as ``serve`` starts the other servers
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env=env, process_group=0
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_up(process, url, log)
        yield VLLM("vllm", url, process.pid, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url + "/health", timeout=30).status_code == 200:
                return
        time.sleep(0.3)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")
