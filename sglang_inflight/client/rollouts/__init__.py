"""Rollouts that go on at another server when theirs dies or drains. Imports no SGLang."""
