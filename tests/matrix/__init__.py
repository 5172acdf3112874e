"""What works where: each way to run a server, with each thing that is done to it, once."""
