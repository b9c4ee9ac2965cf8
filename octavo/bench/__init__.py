"""Benchmarks: of an engine in this process, of servers, of peers, of GPUs; and their records."""
