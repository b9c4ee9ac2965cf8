"""Workloads of a server or a simulator, made of data sets, traces and arrival processes."""
