"""Constrained output: grammars of what answers may be, and masks of the tokens that follow them."""
