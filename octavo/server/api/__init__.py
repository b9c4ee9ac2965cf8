"""The APIs that clients speak: a folder for each, and the modules that they share."""
