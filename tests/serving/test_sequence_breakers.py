"""The tokens that end a sequence which may not be repeated."""

from __future__ import annotations

from octavo.serving.sequence_breakers import SequenceBreakers


class Words:
    """A vocabulary of a few texts; it counts how often it is read."""

    texts = ("a", ":", " b:\n", '"', "end", "ing")
    num_read = 0

    def token_bytes(self, token_id: int) -> bytes:
        self.num_read += 1
        return self.texts[token_id].encode()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return {"ending": [4, 5]}.get(text, [])


def test_a_token_that_holds_a_text_breaks():
    breakers = SequenceBreakers(Words(), 6)
    assert breakers.token_ids((":", "\n")) == {1, 2}
    assert breakers.token_ids(()) == frozenset()


def test_a_text_that_no_token_holds_breaks_at_its_last_token():
    assert SequenceBreakers(Words(), 6).token_ids(("ending", "ß")) == {5}


def test_a_list_is_looked_for_once():
    words = Words()
    breakers = SequenceBreakers(words, 6)
    breakers.token_ids((":",))
    count = words.num_read
    assert breakers.token_ids((":",)) == {1, 2} and words.num_read == count
