"""Families of models, the files that they are read from and written to, and their sizes."""
