"""Measuring: how fast a model runs here, what a server gives, and how both are said."""
