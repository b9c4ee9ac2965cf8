"""Runs a loaded model for callers in this process: the loop, text in and out, outputs."""
