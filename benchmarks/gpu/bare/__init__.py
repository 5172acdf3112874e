"""The kit for a bare machine: it makes a pack, unpacks it there, and tells what is missing."""
