"""Take the images of docs/pictures again: the page of a server, in Chromium.

    octavo serve smollm2-135m --spec-method ngram --max-model-len 2048 --num-blocks 400
    python scripts/docs_pictures.py http://127.0.0.1:8000/

The server should have nothing else to do: its dashboard is shown with requests that this sends, and
its chat with one.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "page"))

from conftest import Browser, Page  # noqa: E402

MARGIN = 10  # above; below, the summary of a chart's table begins soon
MARGIN_BELOW = 5
QUALITY = 30  # of WebP: text can still be read well
SECONDS_BETWEEN = 0.7  # requests, so that some are prompts while others are being answered

ASK = "Explain photosynthesis in three sentences, then say the same three sentences again."
THEMES = ("the sea", "a crow", "winter", "a king", "cheese", "the moon", "trains", "bread")


@dataclass(frozen=True, slots=True)
class Shot:
    """A part of a page: from the top of ``first`` to the end of ``last``, by CSS selectors."""

    name: str
    address: str
    first: str
    last: str
    prepare: Callable[[Page], None]
    width: int = 736  # of the window, in pixels: as wide as documents are
    scale: float = 1.0  # of the image


def chart(number: int) -> str:
    return f".drawing .chart:nth-of-type({number})"


def table(number: int) -> str:
    return f".drawing > :nth-child({number})"


def drawn(tab: Page) -> None:
    tab.wait_for("document.querySelector('.figures .figure') !== null")
    empty = "document.querySelector('.chart-svg:empty')"  # charts are drawn a frame later
    tab.wait_for(f"{empty} === null")
    tab.js("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def loaded(tab: Page) -> None:
    """A dashboard while requests come, and some have left."""
    tab.wait_for_text("#state", "ready")
    for number, theme in enumerate(THEMES):
        Thread(target=ask, args=(tab.address, theme, 20 + 10 * number**2), daemon=True).start()
        time.sleep(SECONDS_BETWEEN)


def answered(tab: Page) -> None:
    """A chat whose tokens are shown, one of them read."""
    tab.wait_for("document.getElementById('model-name').innerText !== ''")
    tab.js("""(() => {
        tokens.value = "on";
        temperature.value = "0";
        for (const input of [tokens, temperature]) {
            input.dispatchEvent(new Event("input", {bubbles: true}));
        }
    })()""")
    tab.send(ASK)
    tab.wait_for("document.querySelector('.note').innerText !== ''", timeout=60)
    tab.js("document.querySelectorAll('.token')[9].click()")
    tab.js("document.activeElement.blur()")


STAGE = ".chart-stage"
SHOTS = (
    Shot("memory-wall", "pictures#memory-wall?batch=64", chart(1), f"{chart(1)} {STAGE}", drawn),
    Shot("kv-growth", "pictures#kv-growth", chart(1), f"{chart(1)} {STAGE}", drawn),
    Shot("flash-tiles", "pictures#flash-tiles?step=3", table(1), table(2), drawn),
    Shot("paged-kv", "pictures#paged-kv?step=9", ".happening", ".tables", drawn),
    Shot("batching", "pictures#batching", chart(1), f"{chart(2)} {STAGE}", drawn),
    Shot("speculation", "pictures#speculative-decoding", ".phase", f"{chart(1)} {STAGE}", drawn),
    Shot("dashboard", "engine", ".tools", "#kv", loaded, 1020, 0.7),
    Shot("tokens", "", ".note", ".answer", answered),
)


def main(address: str, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        try:
            for shot in SHOTS:
                image = take(Page(browser, address), shot)
                (folder / f"{shot.name}.webp").write_bytes(image)
                print(f"{shot.name}: {len(image):,} bytes")
        finally:
            browser.close()


def take(tab: Page, shot: Shot) -> bytes:
    tab.show(shot.width, 4000)  # all of it is in the window
    tab.open(shot.address)
    shot.prepare(tab)
    top, bottom = tab.js(f"""[
        document.querySelector({json.dumps(shot.first)}).getBoundingClientRect().top,
        document.querySelector({json.dumps(shot.last)}).getBoundingClientRect().bottom,
    ].map(Math.round)""")
    height = bottom - top + MARGIN + MARGIN_BELOW
    clip = {"x": 0, "y": top - MARGIN, "width": shot.width, "height": height, "scale": shot.scale}
    shown = tab.call("Page.captureScreenshot", format="webp", quality=QUALITY, clip=clip)
    return base64.b64decode(shown["data"])


def ask(address: str, theme: str, num_tokens: int) -> None:
    """An answer that begins like others and says things twice: there is something to see."""
    system = "You are a poet. You like to repeat yourself, word for word, and you never hurry."
    text = f"Write a long poem about {theme}. Write it twice."
    body = {
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": text}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{address}v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request).read()


if __name__ == "__main__":
    main(sys.argv[1], ROOT / "docs" / "pictures")
