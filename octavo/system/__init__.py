"""The machine that octavo runs on, with its processor, memory, GPU software and energy."""
