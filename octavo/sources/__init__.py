"""Where a model is read from: a checkpoint, an engine folder, or the transformers library."""
