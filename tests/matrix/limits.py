"""``python -m tests.matrix.limits``: write what arguments refuse into a page, without a server.

The reasons are those of the table that a server reads (``sglang_inflight/capabilities.py``).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from sglang.srt.server_args import ServerArgs

from harness.marker import CONFIG
from harness.starting import ROOT
from sglang_inflight import capabilities
from sglang_inflight.vocabulary.answers import Capabilities

PAGE = ROOT / "docs" / "reference" / "limits.md"
BEGIN, END = "<!-- limits -->\n", "<!-- end of limits -->\n"
CAN, CANNOT = "✓", " "
# SGLang composes the parameters at run time
ARGUMENTS: Any = ServerArgs

PREFILL, DECODE = {"disaggregation_mode": "prefill"}, {"disaggregation_mode": "decode"}
SERVERS: dict[str, dict[str, Any]] = {
    "one rank, `--tp-size`": {"tp_size": 2},
    "`--dp-size` above 1": {"dp_size": 2},
    "`--pp-size` above 1": {"pp_size": 2},
    "`--pp-size` above 1 with attention DP": {"pp_size": 2, "attn_dp_size": 2},
    "`--pp-size` above 1 with speculative decoding": {
        "pp_size": 2,
        "speculative_algorithm": "NGRAM",
    },
    "`--pp-size` above 1 with disaggregation": {"pp_size": 2, **PREFILL},
    "`--pp-size` above 1 with a hierarchical cache": {
        "pp_size": 2,
        "enable_hierarchical_cache": True,
    },
    "`--disaggregation-mode prefill`, or `decode`": PREFILL,
    "`decode` with adapters, images or `--api-key`": DECODE,
    "`--enable-hierarchical-cache`": {"enable_hierarchical_cache": True},
    "`--hicache-storage-backend`": {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "mooncake",
    },
    "LMCache, FlexKV": {"enable_lmcache": True},
    "`--enable-eplb`, `--elastic-ep-backend`": {"enable_eplb": True},
    "`--weight-cache-mode`, `--offload-group-size`": {"weight_cache_mode": "client"},
    "`--enable-pdmux`": {"enable_pdmux": True},
    "speculative decoding": {"speculative_algorithm": "NGRAM"},
    "`--enable-dp-attention`": {"tp_size": 2, "attn_dp_size": 2},
}


def write() -> str:
    """Return the table. Its servers have ``--enable-lora``."""
    rows = Capabilities.__struct_fields__
    lines = [["server", *(f"`{row}`" for row in rows)], ["---"] * (1 + len(rows))]
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "config.json").write_text(json.dumps(CONFIG))
        for name, given in SERVERS.items():
            args = ARGUMENTS(model_path=model, enable_lora=True, **given)
            can = capabilities.with_store(capabilities.of(args), args)
            lines.append([name, *(CAN if can[row] is None else CANNOT for row in rows)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def replace_between(document: Path, begin: str, end: str, text: str) -> None:
    before, rest = document.read_text().split(begin)
    _, after = rest.split(end)
    document.write_text(f"{before}{begin}{text}{end}{after}")


def write_into_page() -> None:
    replace_between(PAGE, BEGIN, END, write())


if __name__ == "__main__":
    write_into_page()
