"""The chat page in a real browser, against a server whose answers are known."""

from __future__ import annotations

import json
import re

import pytest

pytestmark = pytest.mark.slow
ANSWER = "article.answer .prose"
STATS = "article.answer .stats"
ERROR = "article.answer .error-box"
# Which of the two buttons beside the message is there.
BUTTONS = """Object.fromEntries(["stop", "send"].map(
    (id) => [id, document.getElementById(id).checkVisibility()]))"""

ATTACKS = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned = 1'>",
    "<svg onload='window.pwned = 1'>",
    "[a](javascript:window.pwned=1) ![b](https://example.org/x.png)",
    "```<img src=x onerror=window.pwned=1>\n<iframe srcdoc='<script>top.pwned=1</script>'>\n```",
    "- **<a href='javascript:window.pwned=1'>c</a>**\n\n# <style>*{display:none}</style>",
]


@pytest.fixture
def ready(tab):
    """The page when it knows the model."""
    tab.open()
    tab.wait_for_text("#model-name", "octavo-test")
    return tab


def send_and_wait(tab, text: str) -> None:
    tab.send(text)
    tab.wait_for_text(".bubble", text)
    tab.wait_for_text(STATS, "cached")


def test_an_answer_streams_and_ends_with_its_figures(ready, chats):
    chats.delay = 0.02
    ready.send("count 40")
    ready.wait_for_text(ANSWER, "3")
    assert "40" not in ready.text(ANSWER)  # it did not come in one piece
    assert ready.js("document.querySelector('.answer').ariaBusy") == "true"
    assert ready.js(BUTTONS) == {"stop": True, "send": False}
    assert ready.js("document.activeElement.id") == "message"
    ready.wait_for_text(STATS, "tokens/s")  # live
    assert "about" in ready.text(STATS)
    ready.wait_for_text(STATS, "cached")
    assert ready.text(ANSWER).split() == [str(n) for n in range(1, 41)]
    parts = ready.text(STATS).split("\n")
    assert parts[0] == "43.2 tokens/s"
    assert parts[1].startswith("first token ")
    assert parts[2:] == ["40 tokens", "prompt 1,234 tokens (1,200 cached)"]
    assert ready.text("#context") == "1,274 of 8,192 tokens of context"
    assert ready.js(BUTTONS) == {"stop": False, "send": True}
    assert chats.requests == [
        {
            "model": "octavo-test",
            "messages": [{"role": "user", "content": "count 40"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "top_p": 0.95,  # neither chosen nor recommended
        }
    ]


OTHER = {"id": "other", "root": "other", "max_model_len": None, "sampling_defaults": None}
CHOICE = "document.getElementById('bar-model')"


def test_one_of_several_models_is_chosen_in_the_bar(tab, chats):
    loaded = {"value": "loaded", "failed": False, "error": None}
    chats.models[0] |= {"root": "octavo-test", "status": loaded}
    away = {"value": "unloaded", "failed": False, "error": None}
    chats.models.append({**OTHER, "status": away})
    tab.open()
    tab.wait_for(f"{CHOICE}.checkVisibility() && {CHOICE}.options.length === 2")
    assert tab.js(f"[...{CHOICE}.options].map((each) => each.text)") == [
        "octavo-test",
        "other (not loaded)",
    ]
    assert not tab.js("document.getElementById('model-name').checkVisibility()")
    tab.js(f"{CHOICE}.value = 'other', {CHOICE}.dispatchEvent(new Event('change'))")
    chats.models[1]["status"] = loaded
    send_and_wait(tab, "count 2")
    assert chats.requests[-1]["model"] == "other"
    tab.wait_for(f"{CHOICE}.selectedOptions[0].text === 'other'")  # it is loaded by now
    tab.click("#open-settings")
    assert tab.js("document.getElementById('model').value") == "other"
    tab.press("Escape")
    assert tab.barriers() == []


def test_one_model_is_a_name_and_no_choice(ready):
    assert not ready.js(f"{CHOICE}.checkVisibility()")


def test_a_conversation_is_sent_whole(ready, chats):
    send_and_wait(ready, "count 1")
    send_and_wait(ready, "count 2")
    assert [(m["role"], m["content"]) for m in chats.requests[-1]["messages"]] == [
        ("user", "count 1"),
        ("assistant", "1 "),
        ("user", "count 2"),
    ]


@pytest.mark.parametrize("how", ["button", "escape", "new chat"])
def test_stopping_ends_the_request_and_keeps_the_text(ready, chats, wait_until, how):
    chats.delay = 0.02
    ready.send("count 100000")
    ready.wait_for_text(ANSWER, "3")
    if how == "button":
        ready.click("#stop")
    elif how == "escape":
        ready.press("Escape")
    else:
        ready.click("#new")
        ready.click("#new-form button", "Begin a new one")
    wait_until(lambda: chats.left == 1)
    if how == "new chat":
        ready.wait_for("log.childElementCount === 0 && !welcome.hidden")
        assert ready.js(BUTTONS) == {"stop": False, "send": True}
    else:
        ready.wait_for_text(".note", "You stopped it.")
        text = ready.text(ANSWER)
        assert text.startswith("1 2 3")
        assert "about" in ready.text(STATS)
    assert ready.js("document.activeElement.id") == "message"
    chats.delay = 0.0
    send_and_wait(ready, "count 5")
    sent = [message["content"].strip() for message in chats.requests[-1]["messages"]]
    assert sent == (["count 5"] if how == "new chat" else ["count 100000", text, "count 5"])


def test_why_it_ended_is_said_and_kept(ready, chats):
    send_and_wait(ready, "count 1")
    assert ready.text(".note") == "The model ended the answer by itself."
    chats.end = {"finish_reason": "stop", "stop_reason": "END"}
    send_and_wait(ready, "count 2")
    assert ready.text(".note") == 'It came to "END", at which it was asked to stop.'
    chats.end, chats.models[0]["max_model_len"] = {"finish_reason": "length"}, 1237
    ready.open()
    ready.wait_for_text("#model-name", "octavo-test")
    assert 'It came to "END"' in ready.text(".note")
    send_and_wait(ready, "count 3")
    assert ready.text(".note") == "It was cut at the end of the context: 1,237 tokens."


def test_stopping_before_the_first_word(ready, chats, wait_until):
    chats.delay = 60.0
    ready.send("count 1")
    wait_until(lambda: chats.requests)
    ready.click("#stop")
    ready.wait_for_text(".note", "You stopped it before it began.")


def test_regenerate_edit_delete_and_undo(ready, chats):
    send_and_wait(ready, "count 1")
    send_and_wait(ready, "count 2")
    ready.click(".actions button", "Regenerate")
    ready.wait_for_text(STATS, "cached")
    assert chats.requests[-1] == chats.requests[-2]
    assert ready.js("log.childElementCount") == 2

    ready.click(".user .actions button", "Edit")
    assert ready.js("document.activeElement.value") == "count 2"
    ready.press("Escape")
    assert ready.text(".bubble") == "count 2"
    ready.js("document.querySelector('.user .actions button').click()")  # of the first turn
    ready.js("document.activeElement.select()")
    ready.write("count 3")
    ready.press("Enter")
    ready.wait_for_text(STATS, "3 tokens")
    assert [m["content"] for m in chats.requests[-1]["messages"]] == ["count 3"]
    assert ready.js("log.childElementCount") == 1
    ready.click("#toast button", "Undo")
    ready.wait_for("log.childElementCount === 2")

    ready.click(".actions button", "Delete")
    ready.wait_for("log.childElementCount === 1")
    assert ready.text(".bubble") == "count 1"
    ready.click("#toast button", "Undo")
    ready.wait_for_text(".bubble", "count 2")
    ready.click("#new")
    ready.click("#new-form button", "Cancel")
    assert ready.js("log.childElementCount") == 2, "it is asked for before anything is gone"
    ready.click("#new")
    ready.click("#new-form button", "Begin a new one")
    ready.wait_for("!welcome.hidden")
    assert ready.js("document.activeElement.id") == "message"


def test_the_keyboard(ready, chats):
    ready.click("#message")
    ready.write("\n  count ")
    ready.press("Enter", shift=True)
    ready.write("3\n")
    assert ready.js("message.value") == "\n  count \n3\n"
    chats.delay = 0.5
    ready.press("Enter")
    assert ready.js("message.value") == ""
    ready.write("count 4")
    ready.press("Enter")  # one at a time: it stays where it is
    assert ready.js("[message.value, log.childElementCount]") == ["count 4", 1]
    chats.delay = 0.01
    ready.wait_for_text(STATS, "cached")
    assert chats.requests[-1]["messages"][0]["content"] == "  count \n3"
    ready.press("Enter")
    ready.wait_for_text(STATS, "4 tokens")
    ready.write("  ")
    ready.press("Enter")
    assert ready.js("[send.disabled, log.childElementCount]") == [True, 2]


def test_a_refusal_says_when_to_come_again(ready, chats):
    error = {"message": "this key may send 20 requests a minute", "code": "rate_limit_exceeded"}
    headers = {"retry-after": "3", "x-request-id": "req-7"}
    chats.refusals["count 1"] = (429, error, headers)
    ready.send("count 1")
    ready.wait_for_text(ERROR, "Too many requests")
    text = ready.text(ERROR)
    assert "this key may send 20 requests a minute" in text
    assert re.search(r"Try again in [123] s\.", text)
    assert "Request req-7" in text
    ready.wait_for_text(ERROR, "You can try again now.")
    del chats.refusals["count 1"]
    ready.click(ERROR + " button", "Try again")
    ready.wait_for_text(STATS, "cached")
    assert ready.js(f"document.querySelector('{ERROR}').hidden")


@pytest.mark.parametrize(
    "answer, title, detail",
    [
        (["one ", "two ", "ERROR"], "The answer broke off", "the engine was restarted"),
        (["one ", "two ", "CUT"], "The connection was lost", "before the answer was complete"),
    ],
)
def test_a_broken_answer_keeps_what_there_is(ready, chats, answer, title, detail):
    chats.answers["go"] = answer
    ready.send("go")
    ready.wait_for_text(ERROR, title)
    assert detail in ready.text(ERROR)
    assert ready.text(ANSWER) == "one two"


def test_errors_of_every_kind_are_readable(ready, chats):
    for status, title in [(400, "refused"), (404, "does not have"), (413, "too large"),
                          (500, "had an error"), (503, "busy"), (504, "too long")]:  # fmt: skip
        chats.refusals["try"] = (status, {"message": f"because of {status}"}, {})
        ready.send("try")
        ready.wait_for_text(ERROR, f"because of {status}")
        assert title in ready.text(ERROR)
    send_and_wait(ready, "count 1")
    assert len(chats.requests[-1]["messages"]) == 1  # what failed is not sent again


def test_settings_are_sent_and_outlive_the_page(ready, chats):
    chats.models.append({"id": "other", "object": "model"})
    ready.open()
    ready.wait_for("model.options.length === 2")
    ready.click("#open-settings")
    ready.wait_for("settings.open")
    chosen = {
        "temperature": "0.25", "top_p": "0.5", "max_tokens": "77", "seed": "5",
        "stop-strings": "END\n\\n\\n", "system": "Be brief.",
    }  # fmt: skip
    for name, value in chosen.items():
        ready.click(f"#{name}")
        ready.write(value)
    ready.js("model.value = 'other'; model.dispatchEvent(new Event('input', {bubbles: true}))")
    ready.press("Escape")
    ready.wait_for("!settings.open")
    expected = {
        "model": "other", "temperature": 0.25, "top_p": 0.5, "max_tokens": 77, "seed": 5,
        "stop": ["END", "\n\n"],
    }  # fmt: skip
    for _ in range(2):
        send_and_wait(ready, "count 1")
        request = chats.requests[-1]
        assert request["messages"][0] == {"role": "system", "content": "Be brief."}
        assert {name: request[name] for name in expected} == expected
        assert ready.text("#model-name") == "other"
        assert ready.text("#system-note") == "System prompt: Be brief."
        ready.open()
        ready.wait_for_text("#model-name", "other")
    ready.click("#open-settings")
    assert ready.js("[temperature.value, model.value]") == ["0.25", "other"]
    ready.click("#reset")
    assert ready.js("[temperature.value, temperature.placeholder]") == ["", "0.6"]
    ready.click("#settings .close")
    send_and_wait(ready, "count 2")
    assert set(chats.requests[-1]) == {"model", "messages", "stream", "stream_options", "top_p"}


def test_a_setting_that_cannot_be_is_refused_beside_its_field(ready, chats):
    ready.click("#open-settings")
    ready.click("#temperature")
    ready.write("0.5")
    ready.write("x")
    ready.wait_for_text("#temperature-problem", "not a number")
    assert ready.js("temperature.ariaInvalid") == "true"
    ready.click("#settings .close")
    send_and_wait(ready, "count 1")
    assert chats.requests[-1]["temperature"] == 0.5  # what was valid last


def test_the_conversation_outlives_a_reload_but_not_the_tab(ready, chats):
    send_and_wait(ready, "count 2")
    chats.delay = 0.02
    ready.send("count 100000")
    ready.wait_for_text(ANSWER, "5")
    ready.open()
    ready.wait_for_text(".note", "The page was left")
    assert ready.js("[...document.querySelectorAll('.bubble')].map((b) => b.innerText)") == [
        "count 2",
        "count 100000",
    ]
    assert ready.text(ANSWER).startswith("1 2 3")
    assert ready.js("Object.keys(localStorage)") == []
    ready.wait_for_text("#model-name", "octavo-test")


def test_what_a_model_writes_stays_text(ready, chats):
    chats.models[0]["id"] = "<img src=x onerror=window.pwned=1>"
    ready.open()
    ready.wait_for_text("#model-name", "<img")
    chats.answers[ATTACKS[0]] = list("\n\n".join(ATTACKS))
    chats.refusals[ATTACKS[1]] = (400, {"message": ATTACKS[1]}, {"x-request-id": ATTACKS[2]})
    send_and_wait(ready, ATTACKS[0])
    text = ready.text(ANSWER)
    for piece in ATTACKS[:4]:
        assert piece in text
    ready.send(ATTACKS[1])
    ready.wait_for_text(ERROR, ATTACKS[1])
    assert ready.js("window.pwned ?? null") is None
    assert ready.js("log.querySelectorAll('script, img, svg, a, style, iframe').length") == 0
    assert ready.js("[...log.querySelectorAll('*')].some((e) => e.onload || e.onerror)") is False


def test_the_policy_is_in_force(ready):
    ready.call("Log.clear")
    refused = "(() => { try { document.body.innerHTML = '<p>'; } catch (e) { return e.name; } })()"
    assert ready.js(refused) == "TypeError"
    ready.js("document.body.append(Object.assign(document.createElement('img'),"
             " {src: 'https://example.org/x.png'}))")  # fmt: skip
    assert ready.js("fetch('https://example.org').catch((error) => error.name)") == "TypeError"
    complaints = " ".join(ready.take_complaints())
    assert "img-src" in complaints
    assert "connect-src" in complaints


def test_the_end_stays_in_view_unless_one_scrolls_away(ready, chats):
    chats.delay = 0.005
    at_end = "scroller.scrollHeight - scroller.clientHeight - scroller.scrollTop < 48"
    chats.answers["go"] = [f"line {n}\n\n" for n in range(2000)]
    ready.send("go")
    ready.wait_for("scroller.scrollHeight > 2 * scroller.clientHeight")
    ready.wait_for(at_end)
    ready.call("Input.dispatchMouseEvent", type="mouseWheel", x=500, y=400, deltaX=0, deltaY=-300)
    ready.wait_for("!document.getElementById('to-end').hidden")
    top, height = ready.js("[scroller.scrollTop, scroller.scrollHeight]")
    ready.wait_for(f"scroller.scrollHeight > {height} + 300")
    assert ready.js("scroller.scrollTop") <= top  # where the reader has put it
    ready.click("#to-end")
    ready.wait_for(at_end)
    height = ready.js("scroller.scrollHeight")
    ready.wait_for(f"scroller.scrollHeight > {height} + 300 && {at_end}")
    ready.press("Escape")
    ready.wait_for_text(".note", "You stopped it.")


def test_an_api_key_is_asked_for_when_it_is_needed(tab, chats):
    chats.api_key = "sesame"
    tab.open()
    tab.wait_for("document.getElementById('key-dialog').open")
    assert tab.js("document.activeElement.id") == "key"
    tab.write("wrong")
    tab.press("Enter")
    tab.wait_for_text("#key-text", "did not accept")
    tab.write("sesame")
    tab.press("Enter")
    tab.wait_for_text("#model-name", "octavo-test")
    send_and_wait(tab, "count 1")
    assert tab.js("JSON.stringify(localStorage)") == "{}"
    assert json.loads(tab.js("sessionStorage['octavo.key']")) == "sesame"
    tab.open()  # still known
    tab.wait_for_text("#model-name", "octavo-test")
    chats.api_key = "changed"
    tab.send("count 2")
    tab.wait_for_text("#key-text", "did not accept")
    tab.write("changed")
    tab.press("Enter")
    tab.wait_for_text(STATS, "2 tokens")
    tab.click("#open-settings")
    tab.click("#forget-key")
    assert json.loads(tab.js("sessionStorage['octavo.key']")) == ""


def test_a_server_that_is_not_ready_can_be_asked_again(tab, chats):
    models, chats.models = chats.models, []
    tab.open()
    tab.wait_for_text("#notice", "No model is being served.")
    chats.models = [{**models[0], "max_model_len": None}]  # the engine is yet to say
    tab.click("#notice button", "Try again")
    tab.wait_for_text("#model-name", "octavo-test")
    assert tab.js("notice.hidden")
    chats.models = models
    send_and_wait(tab, "count 1")
    assert tab.text("#context") == "1,235 of 8,192 tokens of context"


def test_copying(ready, browser, chats):
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    browser.call(
        "Browser.grantPermissions", permissions=permissions, browserContextId=ready.context
    )
    chats.answers["go"] = ["**a**\n\n```py\n", "x = 1\n", "y = 2\n```"]
    send_and_wait(ready, "go")
    ready.click(".answer > .actions button", "Copy")
    ready.wait_for_text(".answer > .actions", "Copied")
    assert ready.js("navigator.clipboard.readText()") == "**a**\n\n```py\nx = 1\ny = 2\n```"
    ready.click(".copy-code")
    ready.wait_for_text(".copy-code", "Copied")
    assert ready.js("navigator.clipboard.readText()") == "x = 1\ny = 2"


@pytest.mark.parametrize("width, height", [(320, 568), (390, 780), (780, 390), (1100, 800)])
def test_nothing_sticks_out_of_the_window(tab, chats, width, height):
    tab.show(width, height, touch=width < 1000)
    chats.models[0]["id"] = "a-model-with-a-long-name-" * 4
    wide = "W" * 300
    text = (
        f"{wide}\n\n```\n{wide}\n```\n\n`{wide}`\n\n- - - - - - {wide}\n\n> > > {wide}\n\n# {wide}"
    )
    chats.answers[wide] = [text]
    chats.refusals["no"] = (429, {"message": wide}, {"retry-after": "5", "x-request-id": wide})
    tab.open()
    tab.wait_for_text("#model-name", "a-model")
    for _ in range(2):
        assert tab.overflowing() == []
        tab.click("#message")
        tab.write(wide)
        tab.click("#send")
        tab.wait_for_text(STATS, "cached")
    # Wide code scrolls in its own box.
    assert (
        tab.js(
            "(() => { const pre = document.querySelector('pre');"
            " pre.scrollLeft = 50; return pre.scrollLeft; })()"
        )
        == 50
    )
    tab.send("no")
    tab.wait_for_text(ERROR, "Too many")
    tab.click(".user .actions button", "Edit")
    assert tab.overflowing() == []
    assert tab.js("document.documentElement.scrollWidth") <= width
    assert tab.js("composer.getBoundingClientRect().bottom") <= height
    assert tab.js("scroller.scrollWidth <= scroller.clientWidth")
    tab.click("#open-settings")
    assert tab.overflowing("#settings") == []


@pytest.mark.parametrize("is_dark", [False, True])
def test_text_can_be_read_in_light_and_dark(tab, chats, is_dark):
    tab.show(1100, 800, dark=is_dark)
    tab.open()
    tab.wait_for_text("#model-name", "octavo-test")
    background = tab.js(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
    )
    assert (max(background) < 64) == is_dark
    assert tab.faint() == []
    chats.answers["go"] = ["text **bold** `code`\n\n> quote\n\n```js\ncode\n```"]
    chats.refusals["no"] = (503, {"message": "full"}, {"retry-after": "9", "x-request-id": "r"})
    send_and_wait(tab, "go")
    tab.send("no")
    tab.wait_for_text(ERROR, "full")
    tab.click("#open-settings")
    tab.click("#seed")
    tab.write("-1")
    assert tab.faint() == []


def test_nobody_is_kept_out(ready, chats):
    chats.answers["go"] = ["text **bold** `code`\n\n> quote\n\n```js\ncode\n```"]
    chats.refusals["no"] = (503, {"message": "full"}, {"retry-after": "9", "x-request-id": "r"})
    ready.js("tokens.value = 'on'; tokens.dispatchEvent(new Event('input', {bubbles: true}))")
    send_and_wait(ready, "go")
    ready.js("document.querySelector('.token').click()")
    ready.send("no")
    ready.wait_for_text(ERROR, "full")
    assert ready.barriers() == []
    ready.js("document.activeElement.blur()")
    assert ready.lost_steps() == []
    ready.click("#open-settings")
    assert ready.barriers() == []


def test_everything_that_can_be_used_has_a_name(ready):
    send_and_wait(ready, "count 1")
    ready.click("#open-settings")
    for is_open in (True, False):
        if not is_open:
            ready.press("Escape")
            ready.wait_for("!settings.open")
        names = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in ready.call("Accessibility.getFullAXTree")["nodes"]
            if not node["ignored"]
            and node["role"]["value"] in ("button", "textbox", "combobox", "dialog", "log")
        ]
        assert len(names) > 5
        assert [role for role, name in names if not name] == []
    assert ("log", "Conversation") in names
    assert ("button", "Send") in names
    assert ("textbox", "Message") in names
