"""A program that uses octavo's public names, for mypy to read with --strict, as its users would."""

from __future__ import annotations

from octavo import LLM, AsyncLLM, EngineArgs, OctavoError, RequestOutput, SamplingParams
from octavo.planner import Plan, Traffic, plan
from octavo.quantize import Scheme


def answer(prompts: list[str]) -> list[str]:
    with LLM("smollm2-135m", max_model_len=2048) as llm:
        outputs: list[RequestOutput] = llm.generate(prompts, SamplingParams(temperature=0))
        return [output.outputs[0].text for output in outputs]


def stream(llm: LLM, prompt: str) -> str:
    text = ""
    chunks = llm.stream(prompt)
    for chunk in chunks:
        text += chunk.text
        if len(text) > 100:
            chunks.close()
    return text


async def answer_later(args: EngineArgs, prompt: str) -> str:
    llm = AsyncLLM.from_engine_args(args)
    last: RequestOutput | None = None
    async for output in llm.generate(prompt, SamplingParams(max_tokens=8), "request-1"):
        last = output
    return last.outputs[0].text if last is not None else ""


def fits(model: str) -> bool:
    try:
        found: Plan = plan(model, "h100-sxm", Traffic(1024, 256, rate=10), slo="ttft=500")
    except OctavoError:
        return False
    return found.is_feasible


def scheme() -> Scheme:
    return Scheme(bits=4, group_size=128)
