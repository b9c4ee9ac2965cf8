"""An engine's settings, as users give them and as they are resolved."""
