"""The OpenAI Agents SDK: an agent calls a tool, whole and streamed, and one answers with a type."""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

url, name = sys.argv[1:]
called = []


@function_tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    called.append(city)
    return f"It is sunny in {city}."


class City(BaseModel):
    name: str
    country: str


async def main() -> None:
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        model = OpenAIChatCompletionsModel(model=name, openai_client=client)
        settings = ModelSettings(temperature=0, max_tokens=100, tool_choice="required")
        agent = Agent(
            name="Weather",
            instructions="Use the tool.",
            model=model,
            tools=[get_weather],
            tool_use_behavior="stop_on_first_tool",
            model_settings=settings,
        )
        result = await Runner.run(agent, "What is the weather in Paris?")
        assert called == ["Paris"] and result.final_output == "It is sunny in Paris.", result

        stream = Runner.run_streamed(agent, "What is the weather in Rome?")
        events = [event async for event in stream.stream_events()]
        assert called[-1] == "Rome" and stream.final_output == "It is sunny in Rome.", stream
        assert len(events) > 5

        settings = ModelSettings(temperature=0, max_tokens=100)
        agent = Agent(name="Cities", model=model, output_type=City, model_settings=settings)
        result = await Runner.run(agent, "Paris is the capital of France.")
        assert result.final_output == City(name="Paris", country="France"), result


asyncio.run(main())
