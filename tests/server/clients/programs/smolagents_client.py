"""smolagents: a model that is told of a tool calls it, and so does an agent."""

import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool

url, name = sys.argv[1:]
called = []


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city.

    Args:
        city: the name of the city
    """
    called.append(city)
    return f"It is sunny in {city}."


question = "What is the weather in Paris?"
model = OpenAIModel(name, api_base=url, api_key="none", temperature=0, max_tokens=150)
messages = [{"role": "user", "content": [{"type": "text", "text": question}]}]
(call,) = model.generate(messages, tools_to_call_from=[get_weather]).tool_calls
assert call.function.name == "get_weather", call

# A small model may never come to its final answer: then the last step says what it has.
answer = ToolCallingAgent(tools=[get_weather], model=model, max_steps=2).run(question)
assert "Paris" in called and answer is not None, (called, answer)
