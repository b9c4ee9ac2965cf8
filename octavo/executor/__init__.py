"""Executors without a model: in simulated time, and around another one with injected faults.

The executor of a model is ``runtime/rank.py``.
"""
