"""What a user copies from. Each is run by ``tests/test_examples.py``."""
