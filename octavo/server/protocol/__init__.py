"""The bodies of OpenAI's API, with vLLM's additions, as pydantic models.

A field that is accepted works. One that asks for something which the engine cannot do is refused
by its name; its value for "nothing, thanks" is accepted, because clients send all their defaults.
"""
