"""Real trainers, each in an environment of its own, on a server of this package."""
