"""The chat page's files as a browser gets them: headers, caching, and nothing from elsewhere."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import urljoin

import httpx
import pytest
from fastapi import FastAPI

from octavo.page import documents, site
from octavo.server.page import routes

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
FILES = site.site_files()
SCRIPTS = sorted(path.relative_to(site.STATIC).as_posix() for path in site.STATIC.rglob("*.js"))
TEXTS = sorted(path for path in site.STATIC.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def ask():
    """``ask(method, path, **headers)`` the router alone; it needs nothing of the service."""
    app = FastAPI(openapi_url=None)
    app.include_router(routes.create_router(None))  # type: ignore[arg-type]

    def ask(method: str, path: str, **headers: str) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://octavo") as client:
                return await client.request(method, path, headers=headers)

        return asyncio.run(send())

    return ask


@pytest.mark.parametrize("path", sorted(FILES))
def test_each_file_comes_with_its_type_and_the_policy(ask, path):
    answer = ask("GET", path)
    assert answer.status_code == 200
    assert answer.content == FILES[path].body
    assert answer.headers["content-type"] == FILES[path].content_type
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert "accept-ranges" not in answer.headers
    directives = answer.headers["content-security-policy"].split("; ")
    assert dict(directive.split(" ", 1) for directive in directives) == POLICY
    head = ask("HEAD", path)
    assert (head.status_code, head.content) == (200, b"")
    assert dict(head.headers) == dict(answer.headers)


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
    assert ask("GET", "/static/chat/app.js").headers["etag"] != tag


@pytest.mark.parametrize("address", site.MOVED)
def test_docs_lead_to_the_first_document(ask, address):
    """Wherever a reverse proxy has put the page."""
    for method in ("GET", "HEAD"):
        moved = ask(method, address)
        assert (moved.status_code, moved.content) == (307, b"")
        assert urljoin(address, moved.headers["location"]) == "/docs/inference"
        assert "content-security-policy" in moved.headers


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
        "/static/chat",
        "/static/chat/chat.html",
        "/static/../site.py",
        "/static/..%2fsite.py",
        "/static/%2e%2e/site.py",
        "/static/chat/app.js/",
        "/static/chat//app.js",
        "/static/chat/APP.JS",
        "/docs/testing",  # a document that is not among those of the page
    ],
)
def test_nothing_else_is_served(ask, path):
    assert ask("GET", path).status_code in (307, 404)
    assert b"import" not in ask("GET", path).content


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_the_page_is_only_read(ask, method):
    assert ask(method, "/").status_code == 405


def test_every_file_of_the_folder_is_served():
    pages = {site.STATIC / name for name in site.PAGES.values()}
    assert pages | set(site.static_paths()) == set(TEXTS)


def test_no_file_names_another_host():
    for file in TEXTS:
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w[^\s\"')]*", file.read_text()))
        assert addresses <= {"http://www.w3.org/2000/svg"}, file.name  # a name, not a place


@pytest.mark.parametrize("address", sorted(site.PAGES))
def test_the_html_has_no_inline_script_style_or_handler(ask, address):
    html = FILES[address].body.decode()
    assert re.findall(r"<script\b[^>]*>(.*?)</script>", html, re.S) == [""]
    assert not re.search(r"<style\b|\bstyle=|\bon\w+=|javascript:", html)
    # Relative, so that the page works below a path of a reverse proxy.
    links = re.findall(r'(?:src|href)="([^"]*)"', html)
    assert all(not link.startswith("/") for link in links)
    assert all(ask("GET", urljoin(address, link)).status_code == 200 for link in links)


def test_each_module_that_a_module_imports_is_served():
    for script in SCRIPTS:
        source = (site.STATIC / script).read_text()
        for name in re.findall(r'^(?:import|export|\}).* from "([^"]+)";$', source, re.M):
            assert urljoin(f"/static/{script}", name) in FILES, (script, name)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_make_no_markup_and_no_code_of_text(script):
    source = (site.STATIC / script).read_text()
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
        assert name not in source


@pytest.mark.parametrize("address", sorted(site.PAGES))
def test_the_elements_that_scripts_look_up_are_there_once(address):
    html = FILES[address].body.decode()
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    folder = (site.STATIC / site.PAGES[address]).parent
    app = (folder / "app.js").read_text()
    assert set(re.findall(r'\bat\("([^"]+)"\)', app)) <= set(ids)
    referenced = re.findall(r'(?:for|aria-labelledby|aria-describedby)="([^"]+)"', html)
    assert {name for names in referenced for name in names.split()} <= set(ids)


def test_links_between_pictures_and_documents_lead_somewhere():
    sources = "".join(path.read_text() for path in (site.STATIC / "pictures").glob("*.js"))
    pictures = set(re.findall(r'^  id: "([\w-]+)",$', sources, re.M))
    for name, section in re.findall(r'^  readMore: "([\w-]+)#([\w-]+)",$', sources, re.M):
        assert section in headings(name), section
    for name in documents.paths():
        text = documents.paths()[name].read_text()
        assert set(re.findall(r"\]\(\.\./pictures#([\w-]+)", text)) <= pictures
    assert len(pictures) > 5


def test_images_of_documents_are_there_and_small():
    there, known = documents.image_paths(), documents.contents()["images"]
    shown = set()
    for path in documents.paths().values():
        found = re.findall(r"^!\[([^\]]+)\]\(([^)]+)\)$", path.read_text(), re.M)
        assert all(len(words) > 20 for words, _ in found), "what it shows, for who cannot see it"
        shown |= {target for _, target in found}
    assert shown == set(there) == set(known)
    sizes = [path.stat().st_size for path in there.values()]
    assert max(sizes) <= 30_000 and sum(sizes) <= 200_000
    assert all(100 < size <= 1200 for both in known.values() for size in both)


def headings(name: str) -> set[str]:
    """As addresses have them."""
    titles = re.findall(r"^#+ (.*)$", documents.paths()[name].read_text(), re.M)
    return {re.sub(r"[^\w\s-]", "", title.lower()).replace(" ", "-") for title in titles}


def test_clients_that_take_no_gzip_get_files_as_they_are(ask):
    packed = ask("GET", "/static/chat/app.js")  # httpx takes it, and unpacks
    assert packed.headers["content-encoding"] == "gzip"
    plain = ask("GET", "/static/chat/app.js", **{"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == packed.content
    assert plain.headers["vary"] == packed.headers["vary"] == "Accept-Encoding"
    assert plain.headers["etag"] != packed.headers["etag"]


def test_images_are_sent_as_they_are(ask):
    address = "/static/docs/pictures/dashboard.webp"
    answer = ask("GET", address)
    assert (answer.headers["content-type"], answer.content) == ("image/webp", FILES[address].body)
    assert "content-encoding" not in answer.headers


def test_all_of_it_is_small(ask):
    """What a browser that opens every page is sent; documents and recorded runs come when they are
    read."""
    apart = ("/docs/", "/static/docs/", "/static/recorded/")
    addresses = [name for name in (*FILES, *site.made_files()) if not name.startswith(apart)]
    answers = [ask("HEAD", name, **{"accept-encoding": "gzip"}) for name in addresses]
    sent = sum(int(answer.headers["content-length"]) for answer in answers)
    assert 100_000 < sent <= 250_000
