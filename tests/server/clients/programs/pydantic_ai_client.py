"""pydantic-ai: output by a tool and by a schema, whole and streamed, and an agent with a tool."""

import asyncio
import contextlib
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

url, name = sys.argv[1:]
model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=url, api_key="none"))
settings = {"temperature": 0, "max_tokens": 100, "timeout": 600}


class City(BaseModel):
    name: str
    country: str


async def main() -> None:
    for output in (ToolOutput(City), NativeOutput(City)):
        agent = Agent(model, output_type=output, model_settings=settings)
        result = await agent.run("Paris is the capital of France.")
        assert result.output == City(name="Paris", country="France"), result
        async with agent.run_stream("Rome is the capital of Italy.") as stream:
            parts = [part async for part in stream.stream_output()]
        assert parts[-1] == City(name="Rome", country="Italy"), parts

    agent = Agent(model, model_settings=settings)
    called = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Return the weather of a city."""
        called.append(city)
        return f"It is sunny in {city}."

    # A small model may call it again and again: that it is told of the result is enough.
    with contextlib.suppress(UsageLimitExceeded):
        limits = UsageLimits(request_limit=2)
        await agent.run("What is the weather in Paris?", usage_limits=limits)
    assert called and called[0] == "Paris", called


asyncio.run(main())
