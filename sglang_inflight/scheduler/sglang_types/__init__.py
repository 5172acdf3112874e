"""What of a scheduler's objects we read, write or call. See ``sglang_inflight.sglang_types``."""
