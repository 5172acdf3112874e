"""SGLang's own test of a pause, from SGLang's wheel, against a server with our plugin."""

from __future__ import annotations

import unittest
from typing import ClassVar

import pytest
from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin

from harness.server import Server


@pytest.mark.usefixtures("pause_target")
class TestPauseResumeInPlace(PauseResumeInPlaceMixin, unittest.TestCase):
    """The requests must outlast the kit's second before the pause."""

    base_url: ClassVar[str]
    pause_num_requests = 4
    pause_max_new_tokens = 800
    pause_duration = 1
    pause_ignore_eos = True

    @pytest.fixture
    def pause_target(self, server: Server) -> None:
        type(self).base_url = server.url
