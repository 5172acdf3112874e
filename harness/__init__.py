"""What tests and benchmarks share: servers, event streams, a model that tells, a trainer."""
