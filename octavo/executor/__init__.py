"""Executors without a model: in simulated time, on a hash model, and with injected faults.

The executor of a model is ``runtime/rank.py``.
"""
