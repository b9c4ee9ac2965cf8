"""Speculative decoding: drafters that propose the next tokens, and what drafting is worth.

``drafters.py`` opens the drafter that a ``SpeculativeConfig`` (``settings/speculation.py``) names.
The target verifies drafts in ``runtime/verification.py``, so that answers do not depend on them.
"""
