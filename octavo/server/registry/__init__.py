"""Several models in one server: loaded when they are asked for, within a budget of memory."""
