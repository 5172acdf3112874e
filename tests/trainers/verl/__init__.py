"""verl, whole: its trainer, Ray workers and Ray server, with this package inside of the server."""
