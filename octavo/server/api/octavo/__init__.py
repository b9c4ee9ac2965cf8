"""octavo's own routes."""
