"""Agreement among the ranks of a trainer, in the trainer's own group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from sglang_inflight.client.sender import GroupFailed
from sglang_inflight.vocabulary.errors import ERRORS

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


class TrainerRanks:
    """The trainer's ranks. Each calls each method at the same time as the others.

    So a failure of one rank is raised on all of them.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """``group``: None for that of all the trainer's processes."""
        import torch.distributed as dist

        self._group = group
        self.own, self.count = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        """Return the value of each rank."""
        import torch.distributed as dist

        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self._group)
        return found

    def together(self, do: Callable[[], T]) -> T:
        """Do something on every rank. Raises on every rank if it fails on one."""
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = do()
        except BaseException as error:
            failure = error
        try:
            said = self.gather(_said(failure))
        except RuntimeError as error:
            gone = GroupFailed(f"a rank of the trainer is gone: {error}")
            raise failure or gone from error
        if failure is not None:
            raise failure
        for rank, each in enumerate(said):
            if each is not None:
                raise _heard(each, f"rank {rank} of the trainer")
        return result  # type: ignore[return-value]

    def tell(self, do: Callable[[], T] | None) -> T:
        """Return on every rank what rank 0 makes, by ``do``. Raises there what it raises."""
        import torch.distributed as dist

        box: list[Any] = [None, None]
        failure: BaseException | None = None
        if do is not None:
            try:
                box[0] = do()
            except BaseException as error:
                failure, box[1] = error, _said(error)
        dist.broadcast_object_list(box, group=self._group, group_src=0)
        if failure is not None:
            raise failure
        if box[1] is not None:
            raise _heard(box[1], "rank 0 of the trainer")
        found: T = box[0]
        return found

    def say(self, error: BaseException) -> None:
        """Have the other ranks raise ``error``, where they wait for rank 0's word."""

        def fail() -> None:
            raise error

        with contextlib.suppress(type(error)):
            self.tell(fail)


def _said(error: BaseException | None) -> tuple[str, str] | None:
    return None if error is None else (type(error).__name__, f"{error}")


def _heard(said: tuple[str, str], who: str) -> Exception:
    kind, message = said
    return ERRORS.get(kind, GroupFailed)(f"{who}: {message}")
