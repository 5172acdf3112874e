"""Protocols of a front end's objects (see ``sglang_inflight.sglang_types``)."""
