"""Parts of the reference platform."""
