"""Connections between machines: TLS, a token that is used once, and frames of bounded size."""
