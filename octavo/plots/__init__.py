"""Pictures of results. A function for each draws numbers that are there, and returns a figure."""
