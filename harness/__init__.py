"""Shared code of tests and benchmarks: servers, event streams, a marker model, a trainer."""
