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
    tab.wait_for("location.pathname === '/pictures' && document.querySelector('#picture h2') !== null")
    tab.click("#navigation a", "Docs")
    tab.wait_for("document.querySelector('#prose p') !== null")


def test_images_have_room_before_they_come(tab):
    show(tab, "inference")
    images = "[...document.querySelectorAll('#prose img')]"
    before = tab.js(f"{images}.map((one) => [one.clientWidth, one.clientHeight, one.alt])")
    assert len(before) > 4 and all(all(each) for each in before)
    tab.js(f"{images}.forEach((one) => (one.loading = 'eager'))")
    tab.wait_for(f"{images}.every((one) => one.complete && one.naturalWidth > 0)")
    assert tab.js(f"{images}.map((one) => [one.clientWidth, one.clientHeight, one.alt])") == before


@pytest.mark.parametrize("name", ["inference", "server", "metrics"])
def test_nobody_is_kept_out(tab, name):
    """Text with images, with code, with wide tables."""
    show(tab, name)
    assert tab.barriers() == []
    assert tab.lost_steps() == []
