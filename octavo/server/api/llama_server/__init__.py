"""What clients of llama.cpp's server look for: ``/completion``, ``/props``, ``/apply-template``."""
