"""Measuring: clients that make load, and what they saw."""
