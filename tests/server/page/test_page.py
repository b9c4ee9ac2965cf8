"""The chat page's files as a browser gets them: headers, caching, and nothing from elsewhere."""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest
from fastapi import FastAPI

from octavo.server.page import routes as page

POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "'self' data:",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
SCRIPTS = sorted(file.name for file in page.STATIC.glob("*.js"))


@pytest.fixture
def ask():
    """``ask(method, path, **headers)`` the router alone; it needs nothing of the service."""
    app = FastAPI(openapi_url=None)
    app.include_router(page.create_router(None))  # type: ignore[arg-type]

    def ask(method: str, path: str, **headers: str) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
                return await client.request(method, path, headers=headers)

        return asyncio.run(send())

    return ask


@pytest.mark.parametrize("path", sorted(page.CONTENT_TYPES))
def test_each_file_comes_with_its_type_and_the_policy(ask, path):
    name, content_type = page.CONTENT_TYPES[path]
    answer = ask("GET", path)
    assert answer.status_code == 200
    assert answer.content == (page.STATIC / name).read_bytes()
    assert answer.headers["content-type"] == content_type
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "accept-ranges" not in answer.headers
    directives = answer.headers["content-security-policy"].split("; ")
    assert dict(directive.split(" ", 1) for directive in directives) == POLICY


@pytest.mark.parametrize("path", sorted(page.CONTENT_TYPES))
def test_head_is_get_without_the_body(ask, path):
    get, head = ask("GET", path), ask("HEAD", path)
    assert head.status_code == 200
    assert head.content == b""
    assert dict(head.headers) == dict(get.headers)


def test_a_copy_that_is_up_to_date_is_not_sent_again(ask):
    tag = ask("GET", "/").headers["etag"]
    assert re.fullmatch(r'"[0-9a-f]{32}"', tag)
    for known in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        answer = ask("GET", "/", **{"if-none-match": known})
        assert (answer.status_code, answer.content) == (304, b"")
        assert answer.headers["etag"] == tag
        assert "content-security-policy" in answer.headers
    for other in ('"other"', "", tag.strip('"')):
        assert ask("GET", "/", **{"if-none-match": other}).status_code == 200
    assert ask("GET", "/static/app.js").headers["etag"] != tag


def test_a_range_is_not_honoured_and_html_is_what_everyone_gets(ask):
    answer = ask("GET", "/", range="bytes=0-9", accept="application/json")
    assert answer.status_code == 200
    assert answer.text.startswith("<!doctype html>")
    assert answer.text.endswith("</html>\n")


@pytest.mark.parametrize(
    "path",
    [
        "/static",
        "/static/",
        "/static/index.html",
        "/static/page.py",
        "/static/..%2fpage.py",
        "/static/%2e%2e/page.py",
        "/static/app.js/",
        "/static//app.js",
        "/static/APP.JS",
    ],
)
def test_nothing_else_is_served(ask, path):
    assert ask("GET", path).status_code in (307, 404)
    assert b"import" not in ask("GET", path).content


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_the_page_is_only_read(ask, method):
    assert ask(method, "/").status_code == 405


def test_every_file_of_the_folder_is_served_and_nothing_is_missing():
    assert {name for name, _ in page.CONTENT_TYPES.values()} == {
        file.name for file in page.STATIC.iterdir()
    }


def test_no_file_names_another_host():
    for file in page.STATIC.iterdir():
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w[^\s\"')]*", file.read_text()))
        assert addresses <= {"http://www.w3.org/2000/svg"}, file.name  # a name, not a place


def test_the_html_has_no_inline_script_style_or_handler():
    html = (page.STATIC / "index.html").read_text()
    assert re.findall(r"<script\b[^>]*>(.*?)</script>", html, re.S) == [""]
    assert not re.search(r"<style\b|\bstyle=|\bon\w+=|javascript:", html)
    # Relative, so that the page works below a path of a reverse proxy.
    assert all(not link.startswith("/") for link in re.findall(r'(?:src|href)="([^"]*)"', html))


def test_each_reference_between_the_files_is_served(ask):
    html = (page.STATIC / "index.html").read_text()
    names = [f"/{link}" for link in re.findall(r'(?:src|href)="([^"]*)"', html)]
    for script in SCRIPTS:
        source = (page.STATIC / script).read_text()
        names += [f"/static/{name}" for name in re.findall(r'from "\./([^"]+)"', source)]
    assert len(names) > 8
    assert all(ask("GET", name).status_code == 200 for name in names)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_make_no_markup_and_no_code_of_text(script):
    source = (page.STATIC / script).read_text()
    for name in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        'setAttribute("style',
        "DOMParser",
        "createContextualFragment",
    ):
        assert name not in source.replace("allows innerHTML", "")


def test_the_elements_that_scripts_look_up_are_there_once():
    html = (page.STATIC / "index.html").read_text()
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    app = (page.STATIC / "app.js").read_text()
    assert set(re.findall(r'\bat\("([^"]+)"\)', app)) <= set(ids)
    referenced = re.findall(r'(?:for|aria-labelledby|aria-describedby)="([^"]+)"', html)
    assert {name for names in referenced for name in names.split()} <= set(ids)
