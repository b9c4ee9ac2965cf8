"""How good a model is: perplexity on a text, and how far it is from another run of it.

text -> windows.py      which tokens are computed, which are scored
windows -> perplexity.py   through the engine, in batches; scoring.py sees the logits
logits -> logit_file.py    kept, for later runs to be compared with
logits + file -> divergence.py
"""
