"""instructor: answers with a type, in each of its modes, and one that is streamed."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel

url, name = sys.argv[1:]


class City(BaseModel):
    name: str
    country: str


asked = {
    "model": name,
    "messages": [{"role": "user", "content": "Paris is the capital of France."}],
    "response_model": City,
    "temperature": 0,
    "max_tokens": 100,
    "max_retries": 0,
}
Mode = instructor.Mode
with OpenAI(base_url=url, api_key="none", max_retries=0) as openai:
    for mode in (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON, Mode.JSON_SCHEMA):
        city = instructor.from_openai(openai, mode=mode).chat.completions.create(**asked)
        assert (city.name, city.country) == ("Paris", "France"), (mode, city)
    client = instructor.from_openai(openai, mode=Mode.TOOLS)
    *parts, city = client.chat.completions.create_partial(**asked)
    assert len(parts) > 1 and (city.name, city.country) == ("Paris", "France"), city
