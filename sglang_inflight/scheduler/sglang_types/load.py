"""A scheduler's load reports to routers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from sglang_inflight.sglang_types.describes import describes

_COMPONENTS = "sglang.srt.managers.scheduler_components"


@describes(f"{_COMPONENTS}.load_inquirer.SchedulerLoadInquirer")
class SchedulerLoadInquirer(Protocol):
    def get_loads(self) -> Any: ...


@describes(f"{_COMPONENTS}.load_publisher.SchedulerLoadPublisher")
class SchedulerLoadPublisher(Protocol):
    def publish_load_stat(
        self, load_provider: Callable[[], Any], force: bool = False, snapshot: Any | None = None
    ) -> None: ...
