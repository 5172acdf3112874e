"""The vocabulary of clients and servers: calls, bodies, answers, errors. Imports no SGLang."""
