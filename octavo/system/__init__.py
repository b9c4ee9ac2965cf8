"""The machine that octavo runs on: processor, memory, GPU software and energy."""
