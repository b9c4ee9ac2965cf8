"""Metrics, logs and live streams: they observe the server, and nothing depends on them."""
