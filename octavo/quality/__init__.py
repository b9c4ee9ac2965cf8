"""The quality of a model, as perplexity on a text, and as divergence from another run of it.

text -> windows.py      the tokens that are computed, and those that are scored
windows -> perplexity.py   through the engine, in batches; scoring.py observes the logits
logits -> logit_file.py    kept, as the base of later comparisons
logits + file -> divergence.py
"""
