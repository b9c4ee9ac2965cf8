"""Ollama's API, but for embeddings."""
