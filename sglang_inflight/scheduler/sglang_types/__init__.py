"""Protocols of a scheduler's objects: see ``sglang_inflight.sglang_types``."""
