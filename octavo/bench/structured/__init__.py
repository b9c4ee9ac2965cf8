"""Measures constrained output: whether answers are valid, and what masks cost."""
