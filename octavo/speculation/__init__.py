"""Speculative decoding: who guesses at the next tokens, and what guessing is worth.

``config.py`` is what a user says, ``drafters.py`` makes of it what the engine asks for drafts. That
answers stay what they are is not this package's business: the engine verifies (``runtime/``).
"""
