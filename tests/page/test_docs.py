"""The documents in a real browser."""

from __future__ import annotations

import pytest

from octavo.page import documents

pytestmark = pytest.mark.slow


def show(tab, name: str) -> None:
    tab.open(f"docs/{name}")
    tab.wait_for("document.querySelector('#prose p') !== null")


def test_the_first_document_is_where_docs_lead(tab):
    tab.open("docs")
    tab.wait_for_text("#prose h2", documents.contents()["titles"][documents.NAMES[0]])
    assert tab.js("location.pathname") == f"/docs/{documents.NAMES[0]}"
    tab.click("#navigation a", "Pictures")
    tab.wait_for_text("#picture h2", "wall")
    tab.click("#navigation a", "Docs")
    tab.wait_for("document.querySelector('#prose p') !== null")


def test_images_have_room_before_they_come(tab):
    show(tab, "inference")
    images = "[...document.querySelectorAll('#prose img')]"
    heights = f"{images}.map((one) => one.clientHeight)"
    before = tab.js(heights)
    assert len(before) > 4 and all(before)
    tab.js(f"{images}.forEach((one) => (one.loading = 'eager'))")
    tab.wait_for(f"{images}.every((one) => one.complete && one.naturalWidth > 0)")
    assert tab.js(heights) == before
    sizes = tab.js(f"{images}.map((one) => [one.naturalWidth, one.naturalHeight])")
    names = tab.js(f"{images}.map((one) => one.src.split('/').at(-1))")
    known = documents.contents()["images"]
    assert [tuple(size) for size in sizes] == [known[f"pictures/{name}"] for name in names]


def test_nothing_of_the_markdown_is_left(tab):
    for name in documents.NAMES:
        show(tab, name)
        left = tab.js("""[...document.querySelectorAll("#prose *")].filter((one) =>
            !one.closest("pre, code")).flatMap((one) => [...one.childNodes])
            .filter((node) => node.nodeType === 3).map((node) => node.data)
            .filter((text) => /<!--|-->|]\\(|^#+ |[*][*]/.test(text))""")
        assert left == [], name


def test_a_phone_shows_which_document_this_is(tab):
    tab.show(360, 780, touch=True)
    show(tab, "kernels")
    here = tab.js("document.querySelector('#list [aria-current]').getBoundingClientRect().right")
    assert 0 < here < 361  # a scrolled list may end within a pixel


@pytest.mark.parametrize("name", ["inference", "server", "metrics"])
def test_nobody_is_kept_out(tab, name):
    """Text with images, with code, with wide tables."""
    show(tab, name)
    assert tab.barriers() == []
    assert tab.lost_steps() == []
