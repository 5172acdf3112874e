"""The steps of the kit; each runs alone, too: ``python -m benchmarks.gpu.steps.NAME``."""
