"""Our metrics of a server."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from harness.server import PLAIN, Server


def read(server: Server) -> dict[str, float]:
    """Return our samples by name, summed over labels other than ``result``."""
    text = httpx.get(f"{server.url}/metrics/", timeout=60, **PLAIN).text
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("sglang:inflight_") and "le" not in sample.labels:
                name = sample.name.removeprefix("sglang:inflight_")
                if "result" in sample.labels:
                    name = f"{name}:{sample.labels['result']}"
                samples[name] = samples.get(name, 0.0) + sample.value
    return samples
