"""The model runner of one device: a batch becomes tensors, logits and tokens."""
