"""The chat page."""
