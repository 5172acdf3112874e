"""A sender of tensors in shared memory, stopped together with its children as by Ctrl-Z."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

_CODE = """
import base64, time
from multiprocessing.reduction import ForkingPickler
import torch.multiprocessing
# the default, whose handles are asked of the sender
torch.multiprocessing.set_sharing_strategy("file_descriptor")
tensors = [("lm_head.weight", torch.ones(4))]
print(base64.b64encode(ForkingPickler.dumps(tensors)).decode(), flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def stopped_sender() -> Iterator[str]:
    """Yield the sender's payload."""
    command = [sys.executable, "-c", _CODE]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as sender:
        try:
            assert sender.stdout is not None
            payload = sender.stdout.readline().strip()
            os.killpg(sender.pid, signal.SIGSTOP)
            yield payload
        finally:
            os.killpg(sender.pid, signal.SIGKILL)
