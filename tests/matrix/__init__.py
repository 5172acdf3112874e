"""A table of supported operations: each configuration of a server, by each operation."""
