"""Thoughts of models that reason: the tags around them, as the chat template says."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class ThoughtTags(NamedTuple):
    """The texts with which a thought begins and ends."""

    begin: str
    end: str


# In the order in which they are looked for. A template may have the end alone: it cuts thoughts off
# the answers of earlier turns.
_KNOWN = (
    ThoughtTags("<think>", "</think>"),
    ThoughtTags("[THINK]", "[/THINK]"),  # Mistral
    ThoughtTags("<seed:think>", "</seed:think>"),
    ThoughtTags("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ThoughtTags("Here is my thought process:", "Here is my response:"),  # Granite 3.2
    ThoughtTags("<|channel>thought", "<channel|>"),  # Gemma 4
)


def thought_tags(template_source: str, special_texts: Collection[str]) -> ThoughtTags | None:
    """Return the tags that a template knows, or the vocabulary has; None if there are none."""
    for tags in _KNOWN:
        if any(tag in template_source for tag in tags):
            return tags
    for tags in _KNOWN:
        if all(tag in special_texts for tag in tags):
            return tags
    return None


def ends_in_thought(prompt: str, tags: ThoughtTags, special_texts: Collection[str]) -> bool:
    """Tell whether a rendered prompt ends within a thought, so that the answer goes on with it.

    It does if a thought begins behind the last turn's beginning, and has not ended.
    """
    begin = prompt.rfind(tags.begin)
    if begin < 0:
        return False
    rest = prompt[begin + len(tags.begin) :]
    return tags.end not in rest and not any(text in rest for text in special_texts if text)
