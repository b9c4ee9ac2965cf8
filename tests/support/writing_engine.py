"""An engine that writes what a test says, and what stands around it, for dialects of chats."""

from __future__ import annotations

import asyncio
import json

import httpx

from octavo.core.batch import TokenLogprobs
from octavo.core.thoughts import ThoughtTokens
from octavo.server.engine.generation import EngineFacts, EngineObserver, EngineState, Generation
from octavo.serving.answer_reader import AnswerReader, AskedTools
from octavo.serving.chat_templates import RenderedChat
from octavo.serving.outputs import Delta

# A template that shows what it is given of each message, and begins a thought.
SHOWS = (
    "{% for m in messages %}[{{ m.role }}:{% if m.reasoning_content %}({{ m.reasoning_content }})"
    "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% if m.name %}={{ m.name }}{% endif %}]"
    "{% endfor %}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}<think>"
)
QWEN3 = (
    "{% for m in messages %}<|user|>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% elif inside %}<think>\n{% endif %}"
)


class Writer:
    """An engine that writes texts, one for each sample, in pieces of so many characters. Its tokens
    are bytes, whose log-probabilities tell them."""

    state, num_restarts = EngineState.READY, 0

    def __init__(self, *texts, size=None, reason="stop"):
        self.texts, self.size, self.reason = texts, size, reason
        self.facts = EngineFacts(4096, 64, 260, 1024, 16, (256,))
        self.requests = []
        self.generations = []

    def check_capacity(self, tenant=""):
        pass

    def check_size(self, num_requests, num_tokens):
        pass

    def submit(self, request):
        self.requests.append(request)
        generation = Generation(request, lambda generation: None)
        self.generations.append(generation)
        self.task = asyncio.get_running_loop().create_task(self.write(generation))
        return generation

    async def write(self, generation):
        for index, text in enumerate(self.texts):
            size = self.size or len(text) or 1
            for at in range(0, len(text), size):
                await asyncio.sleep(0)
                ids = list(text[at : at + size].encode())
                logprobs = []
                if generation.request.params.logprobs is not None:
                    logprobs = [TokenLogprobs(token, -float(token), 1, ()) for token in ids]
                generation.push([Delta(index, text[at : at + size], ids, logprobs)])
            generation.push([Delta(index, finish_reason=self.reason)])


class Observer(EngineObserver):
    def __init__(self):
        self.noted = []

    def on_tool_calls(self, format_name, num_calls, malformed):
        self.noted.append((format_name, num_calls, malformed))


class Rendered:
    """Prompts of a format that no template of this tokenizer has."""

    def __init__(self, tokenizer, format, *, inside):
        self.tokenizer, self.format, self.inside = tokenizer, format, inside

    async def chat(self, messages, *, tools, tool_choice, parallel_tool_calls, **options):
        asked = AskedTools.of(tools, tool_choice, parallel=parallel_tool_calls)
        thoughts = None
        if self.format.thoughts is not None:
            ends = tuple(map(str.encode, self.format.ends_of_thought))
            begin = self.format.thoughts.begin.encode()
            thoughts = ThoughtTokens(begin, ends, lambda token: bytes([token]), self.inside)
        reader = AnswerReader(self.format, asked, self.inside, thoughts)
        return RenderedChat("x", [1, 2, 3], reader)

    async def words(self, words):
        return ()


def send(app, method, path, **kwargs):
    """Send one request to an app, and return the answer when it is whole."""

    async def exchange():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(exchange())


def named_events(response):
    """Return the events of a stream in which each has the name of its type."""
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def writing_service(create_service, *texts, template=QWEN3, size=None, reason="stop", **settings):
    """A service whose engine writes ``texts``, and that engine."""
    engine = Writer(*texts, size=size, reason=reason)
    service = create_service(engine, **settings)
    object.__setattr__(service, "observer", Observer())
    service.prompts._chat_template = template
    return service, engine
