"""Refuses a buffer that a transfer through gloo has not filled.

gloo ends a receive when the sender has sent all that it has, also if that is less than the buffer.
The rest of the buffer would be taken for weights. Of a sender that has more, gloo ends the
receiving process, and nothing here can prevent it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_MARK = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
# an end as short as this may equal the mark by chance
_LEAST_BYTES = 8


class Filled(dist.Work):
    """A receive that fails if the last bytes of its buffer are not written."""

    def __init__(self, buffer: torch.Tensor, begin: Callable[[], Any]) -> None:
        """``begin`` begins to receive into ``buffer``, which is contiguous memory of the host."""
        super().__init__()
        end = buffer.reshape(-1).view(torch.uint8)[-len(_MARK) :]
        self._end = end if len(end) >= _LEAST_BYTES else None
        if self._end is not None:
            self._end.copy_(_MARK[: len(end)])
        self._work = begin()

    def is_completed(self) -> bool:
        completed: bool = self._work.is_completed()
        return completed

    def exception(self) -> Any:
        return self._work.exception()

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._work.wait()
        if self._end is not None and torch.equal(self._end, _MARK[: len(self._end)]):
            raise RuntimeError("the sender has sent fewer bytes than its call describes")
        return True
