"""Puts an engine together from scheduler, block manager and cache, over any executor."""
