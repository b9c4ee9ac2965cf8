"""Workloads of a server or a simulator: data sets, traces, arrival processes."""
