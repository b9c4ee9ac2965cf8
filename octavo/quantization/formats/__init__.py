"""Formats of quantized checkpoints, read as codes with scales: one file for each format."""
