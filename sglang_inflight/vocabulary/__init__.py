"""What clients and servers say to each other. Imports no SGLang."""
