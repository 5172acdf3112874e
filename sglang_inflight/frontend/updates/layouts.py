"""The layouts that the ranks keep, so that a call may name one by its digest.

This process alone decides what ranks keep and forget. It says so in the calls with tensors, which
all ranks take in at their arrival, in one order. So all of them keep the same, and none has to
answer for another. A call without a layout is answered here, before anything was sent or posted,
if the ranks do not keep its layout.

A layout counts as kept after the first good answer of all ranks to a call with it: all of them have
read it then. The ranks end with this process, and so does what they keep.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from sglang_inflight.frontend.updates.open_update import OpenUpdate
from sglang_inflight.messages import LaidOut, Source
from sglang_inflight.vocabulary.errors import Refused, UnknownLayout
from sglang_inflight.vocabulary.layouts import MOST_LISTED, digest_of_parts, layout_parts

# Limits of all kept layouts, in bytes of their lines. Kimi K2's 140,000 tensors have 13 MB. A rank
# takes twice as much memory.
MOST_BYTES = 40 << 20
MOST_LAYOUTS = 4096


@dataclass
class _Kept:
    nbytes: int
    is_on_ranks: bool = False
    # to be sent to the ranks
    parts: list[bytes] = field(default_factory=list)
    # number of calls with this layout now
    users: int = 0


class Layouts:
    """Layouts by digest, the last used ones at the end. Lives on the front end's event loop."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    @contextmanager
    def used_by(self, source: Source, session: OpenUpdate | None) -> Iterator[None]:
        """Keep the layout of ``source`` on the ranks during the block, and after its success.

        Raises ``UnknownLayout`` if ``source`` has only the digest of a layout that the ranks do not
        keep: the call's ``session`` then waits for the whole call. Raises ``Refused`` if the digest
        is of another layout.
        """
        if not isinstance(source, LaidOut) or source.layout_digest is None:
            yield
            return
        digest = source.layout_digest
        if not source.names and not self._is_on_ranks(digest):
            if session is not None:
                session.owed.add(digest)
            raise UnknownLayout(
                f"this server keeps no layout with the digest {digest}: repeat the call with "
                "names, dtypes, shapes and layout_digest"
            )
        kept = self._take(digest, source)
        kept.users += 1
        try:
            yield
            kept.is_on_ranks = True
        finally:
            kept.users -= 1
            if not kept.users:
                kept.parts = []
        if session is not None:
            session.owed.discard(digest)

    def attach(self, source: Source) -> None:
        """Add to ``source`` what the ranks lack, and what they may forget.

        Call it right before the source is sent: an earlier decision may be outdated by then. A long
        layout without a digest goes in parts, too, and is not kept.
        """
        if not isinstance(source, LaidOut):
            return
        if source.layout_digest is None:
            if len(source.names) > MOST_LISTED:
                # the ranks refuse lists of different lengths
                with suppress(ValueError):
                    lists = source.names, source.dtypes, source.shapes
                    source.layout_parts = [*layout_parts(*lists)]
                    source.names, source.dtypes, source.shapes = [], [], []
            return
        kept = self._kept[source.layout_digest]
        self._kept.move_to_end(source.layout_digest)
        if not kept.is_on_ranks:
            source.layout_parts = kept.parts
            source.forgets_layouts = [*self._forget_some()]

    def _is_on_ranks(self, digest: str) -> bool:
        return digest in self._kept and self._kept[digest].is_on_ranks

    def _take(self, digest: str, source: LaidOut) -> _Kept:
        """Return the layout of ``source``, and empty its lists if the ranks are to keep it.

        A layout beyond the limits stays in ``source``, without its digest.
        """
        if not source.names:
            return self._kept[digest]
        try:
            parts = [*layout_parts(source.names, source.dtypes, source.shapes)]
        except ValueError as error:
            raise Refused(f"{error}") from error
        if (found := digest_of_parts(parts)) != digest:
            raise Refused(
                f"layout_digest is {digest}, and names, dtypes and shapes have the digest {found}"
            )
        nbytes = sum(map(len, parts))
        if nbytes > MOST_BYTES:
            source.layout_digest = None
            return _Kept(nbytes)
        source.names, source.dtypes, source.shapes = [], [], []
        kept = self._kept.setdefault(digest, _Kept(nbytes))
        if not kept.is_on_ranks:
            kept.parts = parts
        return kept

    def _forget_some(self) -> Iterator[str]:
        """Forget layouts without a call until the limits are kept, the longest unused first."""
        nbytes = sum(kept.nbytes for kept in self._kept.values())
        for digest, kept in [*self._kept.items()]:
            if nbytes <= MOST_BYTES and len(self._kept) <= MOST_LAYOUTS:
                return
            if not kept.users:
                nbytes -= kept.nbytes
                del self._kept[digest]
                yield digest
