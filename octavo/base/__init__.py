"""Helpers for all parts: errors, typed fields of foreign files, atomic files, options."""
