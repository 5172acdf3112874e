"""Examples to copy from. ``tests/test_examples.py`` runs each of them."""
