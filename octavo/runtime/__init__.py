"""One rank: a batch becomes tensors, logits and tokens. torch starts here."""
