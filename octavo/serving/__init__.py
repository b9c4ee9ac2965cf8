"""Runs a model for callers in this process, with the loop, text in and out, and outputs."""
