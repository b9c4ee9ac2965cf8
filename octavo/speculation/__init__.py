"""Speculative decoding by drafters, which propose the next tokens, and formulas of its speed-up.

``drafters.py`` opens the drafter that a ``SpeculativeConfig`` (``settings/speculation.py``) names.
The target verifies drafts in ``runtime/verification.py``, so that answers do not depend on them.
"""
