"""An actor's settings are the driver's, and its wishes fit its device."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from sglang.srt.platforms.cuda import CudaSRTPlatform

from sglang_inflight.extensions.ray import hooks
from sglang_inflight.extensions.ray.actors import replace_settings
from sglang_inflight.hooking import RAY_ENGINE
from sglang_inflight.settings import Settings
from sglang_inflight_tools.platform import ReferencePlatform

BUNDLES = [{"CPU": 1, "GPU": 2}]


def test_settings_of_a_ray_node_do_not_reach_a_server() -> None:
    node = {"SGLANG_INFLIGHT_STAGING": "host", "SGLANG_INFLIGHT_SPANS": "sglang"}
    with patch.dict(os.environ, node):
        replace_settings({"SGLANG_INFLIGHT_STAGING": "off", "SGLANG_INFLIGHT_STAGE_NICE": "3"})
        settings = Settings.from_environment()
    assert (settings.staging, settings.spans, settings.stage_nice) == ("off", "all", 3)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Make what SGLang's launch asks of Ray, without Ray."""
    engine = SimpleNamespace(SchedulerActor=SimpleNamespace(options=lambda **options: options))
    groups = SimpleNamespace(placement_group=lambda bundles, strategy: bundles)
    monkeypatch.setitem(sys.modules, RAY_ENGINE, engine)
    monkeypatch.setitem(sys.modules, "ray.util.placement_group", groups)

    def ask() -> Any:
        actor = engine.SchedulerActor.options(num_cpus=0, num_gpus=1, name="one")
        return groups.placement_group(BUNDLES, strategy="SPREAD"), actor

    return ask


def test_ranks_on_a_cpu_ask_ray_for_no_gpu(
    launch: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "current_platform", ReferencePlatform())
    before = launch()
    asked = hooks.launch_without_gpus(launch)
    assert asked == ([{"CPU": 1}], {"num_cpus": 0, "num_gpus": 0, "name": "one"})
    assert launch() == before


def test_ranks_on_gpus_ask_ray_for_them(
    launch: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "current_platform", CudaSRTPlatform())
    asked = hooks.launch_without_gpus(launch)
    assert asked == (BUNDLES, {"num_cpus": 0, "num_gpus": 1, "name": "one"})


def test_other_threads_groups_keep_their_gpus_during_a_launch(launch: Callable[[], Any]) -> None:
    seen: list[Any] = []
    with hooks.asking_for_no_gpus():
        other = threading.Thread(target=lambda: seen.append(launch()[0]))
        other.start()
        other.join()
    assert seen == [BUNDLES]
