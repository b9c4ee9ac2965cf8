"""Models by the kind of their files (a checkpoint, an engine folder), or run by transformers."""
