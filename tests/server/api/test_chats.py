"""Chats that dialects begin: turns that are dropped, and fields under a dialect's own names."""

from __future__ import annotations

import pytest

from octavo.base.errors import InvalidRequestError
from octavo.server.api.chats import Chat, FieldNames, Length
from octavo.server.engine.generation import EngineFacts


def messages(text: str) -> list[dict[str, str]]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[letter], "content": str(i)} for i, letter in enumerate(text)]


@pytest.mark.parametrize(
    ("given", "count", "left"),
    [
        ("suaua", 0, "01234"),
        ("suaua", 1, "034"),
        ("suatua", 1, "045"),
        ("ssuauau", 2, "016"),
        ("uauau", 2, "4"),
    ],
)
def test_a_turn_begins_with_a_users_message(given, count, left):
    chat = Chat(messages=messages(given))
    kept = chat.without_oldest(count).messages
    assert "".join(message["content"] for message in kept) == left
    assert chat.num_turns == given.count("u")


def test_fields_have_a_dialects_own_names():
    names = FieldNames({"messages": "input.", "stop": "stop_sequences", "seed": "options.seed"})
    for field, own in {
        "messages.3.content": "input",
        "messages": "input",
        "stop": "stop_sequences",
        "stop.1": "stop_sequences.1",
        "stop_token_ids": "stop_token_ids",
        "seed": "options.seed",
        "tools.0.name": "tools.0.name",
    }.items():
        assert names.own(field) == own
        assert names.named(InvalidRequestError("is wrong", field)).field == own
    assert names.named(InvalidRequestError("is wrong")).field is None


def test_a_length_leaves_room_for_the_answer():
    facts = EngineFacts(100, 8, 260, 100, 16, (256,))
    assert Length(max_tokens=30).room(facts) == 70
    assert Length().room(facts) == 99
    assert Length(max_tokens=30, is_bound=True).room(facts) == 99
    assert Length(max_tokens=30, context=50).room(facts) == 20
