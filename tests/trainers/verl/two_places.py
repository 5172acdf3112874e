"""Mend the two places of an installed verl 0.9.1 that SGLang 0.5.23 breaks.

python -m tests.trainers.verl.two_places
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

ROLLOUT = "verl/workers/rollout/sglang_rollout"
# file, line of verl, its replacement
PLACES = (
    # EngineBase has these as abstract methods, and verl's adapter lacks both
    (
        f"{ROLLOUT}/http_server_engine.py",
        "class HttpServerAdapter(EngineBase):\n",
        "class HttpServerAdapter(EngineBase):\n"
        "    begin_weight_update = end_weight_update = None\n\n",
    ),
    # ServerArgs is no dataclass there, and has the option
    (
        f"{ROLLOUT}/async_sglang_server.py",
        'if "enable_weights_cpu_backup" in [f.name for f in dataclasses.fields(ServerArgs)]:\n',
        "if True:\n",
    ),
)


def mend(site_packages: Path) -> None:
    """Write both places. Mending twice changes nothing."""
    for name, broken, mended in PLACES:
        file = site_packages / name
        text = file.read_text()
        if mended in text:
            continue
        if text.count(broken) != 1:
            raise SystemExit(f"{file} has no line {broken.strip()!r}: is it verl 0.9.1?")
        file.write_text(text.replace(broken, mended))


if __name__ == "__main__":
    mend(Path(sysconfig.get_path("purelib")))
