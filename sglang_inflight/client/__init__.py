"""What a trainer uses: ``from sglang_inflight.client import Client``. Imports no SGLang."""

from sglang_inflight.client.client import Client

__all__ = ["Client"]
