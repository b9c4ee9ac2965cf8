"""Plots of results. Each function draws numbers that were measured before, and returns a figure."""
