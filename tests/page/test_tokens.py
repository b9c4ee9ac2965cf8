"""The tokens of an answer in the chat, in a real browser."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture
def with_tokens(tab):
    tab.open()
    tab.wait_for_text("#model-name", "octavo-test")
    tab.click("#open-settings")
    tab.js("""(() => {
        tokens.value = "on";
        tokens.dispatchEvent(new Event("input", {bubbles: true}));
    })()""")
    tab.press("Escape")
    return tab


def test_each_token_with_its_probability_and_alternatives(with_tokens, chats):
    tab = with_tokens
    tab.send("count 3")
    tab.wait_for_text(".tokens", "1,200 of the prompt's 1,234 tokens were cached")
    assert chats.requests[-1]["logprobs"] is True and chats.requests[-1]["top_logprobs"] == 5
    texts = tab.js("[...document.querySelectorAll('.token')].map((each) => each.textContent)")
    assert texts == ["1 ", "2 ", "3 "]
    tab.js("document.querySelector('.token-list').focus()")
    tab.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight", code="ArrowRight")
    assert tab.text(".token-reading").startswith('"1 ": 80%, came after')
    assert tab.text(".token-top").split() == ['"1', '"', "80%", '"other"', "15%"]
    tab.open()
    tab.wait_for("document.querySelectorAll('.token').length === 3")


def test_nobody_who_did_not_ask_gets_them(tab, chats):
    tab.open()
    tab.wait_for_text("#model-name", "octavo-test")
    tab.send("count 2")
    tab.wait_for_text(".answer", "1 2")
    assert "logprobs" not in chats.requests[-1]
    assert tab.js("document.querySelector('.tokens').checkVisibility()") is False


def test_what_was_guessed_is_said(with_tokens, chats):
    chats.timings |= {"draft_n": 8, "draft_n_accepted": 6}
    with_tokens.send("count 2")
    with_tokens.wait_for_text(".tokens", "8 tokens were guessed ahead, 6 of them accepted (75%).")
