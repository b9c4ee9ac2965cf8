"""The engine: scheduling, block accounting and request state. No torch, no I/O, no clock reads.

Start at :mod:`octavo.core.engine`, then :mod:`octavo.core.scheduler`.
"""
