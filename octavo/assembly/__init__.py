"""Puts an engine together: scheduler, block manager and cache over any executor."""
