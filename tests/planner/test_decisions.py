from __future__ import annotations

from octavo.planner import Traffic, plan
from octavo.planner.decisions import decisions


def answers(*arguments, **choices) -> dict[str, bool]:
    found = decisions(plan(*arguments, **{"engine": "vllm", **choices}).verdict)
    assert all(each.because and each.then for each in found)
    return {each.question: each.answer for each in found}


def answer(found: dict[str, bool], words: str) -> bool:
    (said,) = (answer for question, answer in found.items() if words in question)
    return said


def test_what_fits_one_device_is_known_by_its_memory():
    assert answer(answers("llama-3.1-8b", "h100-sxm"), "does one device hold it")
    assert not answer(answers("llama-3.1-70b", "h100-sxm:4"), "does one device hold it")


def test_more_devices_win_until_they_talk_more_than_they_gain():
    large = answers("llama-3.1-70b", "h100-sxm:4", tp=2)
    small = answers("qwen3-0.6b", "l40s")
    assert answer(large, "on 4 devices") and not answer(small, "on 2 devices")


def test_links_are_asked_about_where_there_are_several_devices():
    assert answer(answers("llama-3.1-70b", "h100-sxm:4"), "is the link")
    assert not answer(answers("llama-3.1-8b", "rtx4090:2"), "is the link")
    assert not any("link" in question for question in answers("llama-3.1-8b", "h100-sxm"))


def test_steps_of_many_streams_compute_longer_than_they_read():
    few, many = (
        answers("llama-3.1-8b", "a100-80-sxm", Traffic(64, 64, concurrency=count))
        for count in (1, 600)
    )
    assert answer(few, "wait for memory") and not answer(many, "wait for memory")


def test_long_prompts_take_most_of_the_time():
    long, short = (
        answers("llama-3.1-8b", "h100-sxm", Traffic(length, 16, concurrency=4))
        for length in (8000, 16)
    )
    assert answer(long, "prompts take most") and not answer(short, "prompts take most")


def test_a_full_cache_bounds_long_requests():
    long, short = (answers("llama-3.1-8b", "rtx4090", Traffic(length, 16)) for length in (4000, 16))
    assert answer(long, "does the KV cache bound")
    assert not answer(short, "does the KV cache bound")
