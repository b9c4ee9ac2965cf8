"""The API of llama.cpp's server beside OpenAI's: ``/completion``, ``/infill``, ``/slots``,
``/props``, ``/apply-template``."""
