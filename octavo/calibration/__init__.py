"""Measuring what an engine's steps take on this machine, so that what is foreseen is known.

A few scripted loads run through the live engine; each of its steps is written down with what it
computed; a line is put through them (`fit`), and kept (`store`) for simulations.
"""
