"""One folder for each extension, see ``extension.py``."""
