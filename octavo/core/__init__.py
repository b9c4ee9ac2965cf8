"""The engine, with its scheduling, block accounting and request state. No torch, no I/O.

Start at :mod:`octavo.core.engine`, then :mod:`octavo.core.scheduler`.
"""
