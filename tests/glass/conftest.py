"""These tests need a process whose torch has the card: ``make test-glass``."""

from __future__ import annotations

import torch

# `make test` has the CPU as its only device, and an accelerator would change its other tests
collect_ignore_glob = [] if hasattr(torch, "glass") else ["*"]
