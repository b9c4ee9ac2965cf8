"""Routes that only octavo has."""
