"""The kit that shows on a GPU, in ten minutes, what the package claims."""
