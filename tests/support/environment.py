"""The environment of all servers that tests start: one for all workers of a run.

Workers and their servers are forks of a process that has imported SGLang in it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from harness import starting

_NAME = "INFLIGHT_TEST_HUB"
# a worker's is that of the process that distributes the tests
_made = None if _NAME in os.environ else tempfile.TemporaryDirectory(prefix="inflight-hub-")
if _made is not None:
    os.environ[_NAME] = _made.name

# what servers find on the Hub
HUB = Path(os.environ[_NAME])


def set_up() -> None:
    starting.ENV |= {
        starting.STEP_MS: "5",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(HUB),
        # each rank of a server would compile what SGLang has for a GPU, for 3 s of its start
        "TORCHDYNAMO_DISABLE": "1",
    }
