"""Benchmarks of an engine in this process, of servers, of peers and of GPUs, and their records."""
