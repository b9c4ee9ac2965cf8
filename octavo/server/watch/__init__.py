"""What is counted and written down. It observes, and nothing depends on it."""
