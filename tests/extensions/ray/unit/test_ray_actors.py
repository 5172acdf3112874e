"""An actor's settings: its node's stay only where they are the driver's."""

from __future__ import annotations

import os
from unittest.mock import patch

from sglang_inflight.extensions.ray.actors import replace_settings
from sglang_inflight.settings import Settings


def test_settings_of_a_ray_node_do_not_reach_a_server() -> None:
    node = {"SGLANG_INFLIGHT_STAGING": "host", "SGLANG_INFLIGHT_SPANS": "sglang"}
    with patch.dict(os.environ, node):
        replace_settings({"SGLANG_INFLIGHT_STAGING": "off", "SGLANG_INFLIGHT_STAGE_NICE": "3"})
        settings = Settings.from_environment()
    assert (settings.staging, settings.spans, settings.stage_nice) == ("off", "all", 3)
