"""Modules that models are made of: attention, MLPs, experts, norms, embeddings, recurrences."""
