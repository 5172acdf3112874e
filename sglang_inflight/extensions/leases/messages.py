"""Messages between a replica's ranks."""

from __future__ import annotations

from sglang.srt.managers.io_struct import BaseReq


class LeasesOver(BaseReq, kw_only=True):
    """Leases that expired by the first rank's clock."""

    # ids of the requests that left them
    rids: list[str]
