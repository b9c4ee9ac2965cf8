"""Calibration of predictions, by measured step times of an engine on this machine.

A few scripted loads run through the live engine; the time of each step is recorded with its batch;
a line is fitted to them (`fit`), and kept (`store`) for simulations.
"""
