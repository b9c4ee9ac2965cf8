"""Helpers for all parts, such as errors, typed fields of foreign files, atomic files, options."""
