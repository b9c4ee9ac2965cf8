"""The API of llama.cpp's server beside OpenAI's: ``/completion``, ``/props``,
``/apply-template``."""
