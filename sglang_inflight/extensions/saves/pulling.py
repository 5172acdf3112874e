"""Receives weights that another server offers over the network (``offering.py``).

Each rank connects to its namesake: the rank of its own position in the pipeline and in tensor
parallelism. A layout that differs, a name, a shape or a dtype is refused before memory is taken for
a tensor, and an altered tensor before it is used. The network's calls are made by an abandonable
thread, so a peer that is gone costs this update alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager

import torch

from sglang_inflight.extensions.saves.manifest import name_of_rank
from sglang_inflight.extensions.saves.served_part import (
    ServedTensor,
    checked,
    require_layout,
    require_tensors,
)
from sglang_inflight.extensions.saves.stream import Connection, Head, Kind, naming
from sglang_inflight.messages import PeerSource, SavedVersion
from sglang_inflight.scheduler.update.rate import RateLimit
from sglang_inflight.scheduler.update.sources.abandonable import AbandonableThread
from sglang_inflight.scheduler.update.sources.regular_file import ReadBuffers
from sglang_inflight.tensor_digest import HostReader
from sglang_inflight.vocabulary.answers import RankOffered
from sglang_inflight.vocabulary.errors import Conflict, Refused, list_names


class PulledPart:
    """One rank's part of an offer. Belongs to the staging thread.

    The first reading uses the connection of the head, and each later one a connection of its own.
    """

    def __init__(self, source: PeerSource, offered: RankOffered, thread: AbandonableThread) -> None:
        """Connect, and receive the head."""
        self._source = source
        self._offered = offered
        self._thread = thread
        self._wanted: Mapping[str, torch.Tensor] = {}
        # tensors' digests in the first reading, by name
        self._digests: dict[str, str] = {}
        self._digest = offered.digest
        self._connection: Connection | None = None
        self._head = self._connect()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    @property
    def version(self) -> SavedVersion:
        return SavedVersion(save_id=self._head.offer_id, weight_version=self._head.weight_version)

    @property
    def digest(self) -> str:
        assert self._digest is not None, "the digest comes after the tensors"
        return self._digest

    @property
    def numbers(self) -> Mapping[str, str]:
        return self._head.numbers

    def require(self, layout: Mapping[str, str], wanted: Mapping[str, torch.Tensor]) -> None:
        require_layout(self._head.layout, layout)
        found = {each.name: (each.dtype, each.shape) for each in self._head.tensors}
        if len(found) < len(self._head.tensors):
            raise Refused("a tensor comes twice")
        require_tensors(found, wanted)
        self._wanted = wanted

    def read(self, rate_limit: RateLimit, check: Callable[[], None]) -> Iterator[ServedTensor]:
        if self._connection is None and self._connect() != self._head:
            raise Conflict("the peer offers something else than before")
        connection, self._connection = self._connection, None
        assert connection is not None
        with closing(connection):
            yield from self._receive_all(connection, rate_limit, check)

    def _receive_all(
        self, connection: Connection, rate_limit: RateLimit, check: Callable[[], None]
    ) -> Iterator[ServedTensor]:
        """Yield each tensor, while the next one comes."""
        names = [each.name for each in self._head.tensors]
        reader = HostReader()
        buffers = ReadBuffers(max((tensor.nbytes for tensor in self._wanted.values()), default=0))
        # a limit for the receiving thread, which sleeps by itself
        spend = rate_limit.for_another_thread().spend

        def begin(index: int) -> torch.Tensor | None:
            if index == len(names):
                self._thread.begin(lambda: connection.receive_digest(Kind.END))
                return None
            nbytes = self._wanted[names[index]].nbytes
            content = buffers.take(max(1, nbytes))[:nbytes]

            def receive() -> str:
                connection.receive_into(content.numpy().data, spend)
                return connection.receive_digest(Kind.DIGEST)

            self._thread.begin(receive)
            return content

        coming = begin(0)
        try:
            for index, name in enumerate(names):
                digest: str = self._thread.end()
                content, coming = coming, begin(index + 1)
                assert content is not None
                if self._digests.setdefault(name, digest) != digest:
                    raise Conflict(f"the peer has sent {name!r} with two digests")
                wanted = self._wanted[name]
                tensor = content.view(wanted.dtype).view(wanted.shape)
                yield checked(name, tensor, digest, reader, check)
                # a reference would keep the buffer from its next use
                del content, tensor
            whole: str = self._thread.end()
        finally:
            del coming
            buffers.give_back()
        if self._digest not in (None, whole):
            raise Conflict(f"it has sent the digest {whole}, and offered {self._digest}")
        self._digest = whole

    def _connect(self) -> Head:
        offered, source = self._offered, self._source

        def connect() -> tuple[Connection, Head]:
            connection = Connection.to(offered.host, offered.port, source.token)
            try:
                return connection, connection.receive_head()
            except BaseException:
                connection.close()
                raise

        self._connection, head = self._thread.do(connect)
        if head.offer_id != source.offer_id:
            raise Refused("it sends another offer")
        return head


@contextmanager
def open_pulled(source: PeerSource, rank: str, check: Callable[[], None]) -> Iterator[PulledPart]:
    """Connect to the namesake of ``rank``. Raises ``Conflict`` if it is gone or silent.

    ``check`` raises when it is time to give up.
    """
    by_name = {name_of_rank(each.pp_rank, each.tp_rank): each for each in source.ranks}
    if (offered := by_name.get(rank)) is None:
        raise Refused(
            f"it is offered by a server of other ranks: {list_names([*by_name])}, and this one is "
            f"{rank}"
        )
    with (
        AbandonableThread(check) as thread,
        naming(rank, offered.host, offered.port),
        closing(PulledPart(source, offered, thread)) as part,
    ):
        yield part
