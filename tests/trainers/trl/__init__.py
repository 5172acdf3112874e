"""TRL's own trainer and client, on a server of this package."""
