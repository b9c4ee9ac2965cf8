"""OpenAI's ``/v1/responses``: answers as lists of items, which the server may keep."""
