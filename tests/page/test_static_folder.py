"""``octavo page``: the joined script, and the folder from disk in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from octavo import cli
from octavo.base.errors import ConfigError
from octavo.page import site
from octavo.page.script_bundle import join_modules
from octavo.page.static_folder import write_static_folder

NODE = shutil.which("node")
MODULES = {
    "app.js": (
        'import { one, two as second } from "./parts/index.js";\n'
        'import * as all from "./parts/one.js";\n'
        'import {\n  later,\n} from "./parts/one.js";\n'
        "globalThis.seen = [one, second(), all.one, later(), new all.Box().value];\n"
    ),
    "parts/index.js": (
        'export { one, one as again } from "./one.js";\nexport { two } from "../two.js";\n'
    ),
    "parts/one.js": (
        "export const one = 1;\nexport async function* stream() {}\n"
        "export function later() {\n  return hidden;\n}\nconst hidden = 3;\n"
        "export class Box {\n  value = 4;\n}\n"
    ),
    "two.js": 'export function two() {\n  return "import";\n}\n',
    "unused.js": 'throw new Error("nobody asked");\n',
}


@pytest.mark.skipif(NODE is None, reason="needs Node.js 20 or later (apt-get install nodejs)")
def test_joined_modules_do_what_modules_do(tmp_path):
    script = "globalThis.document = {currentScript: {dataset: {entry: 'app.js'}}};\n"
    (tmp_path / "joined.cjs").write_text(
        script + join_modules(MODULES) + "console.log(JSON.stringify(seen));"
    )
    done = subprocess.run([str(NODE), "joined.cjs"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == '[1,"import",1,3,4]\n', done.stderr


@pytest.mark.parametrize(
    "source",
    [
        'import x from "./y.js";',
        'import "./y.js";',
        "import { a } from './y.js';",
        "export default 1;",
        "export const { a, b } = c;",
        'const y = await import("./y.js");',
        "const here = import.meta.url;",
        'export * from "./y.js";',
        "async function ask() {}",
    ],
)
def test_a_form_that_the_bundle_cannot_hold_is_an_error(source):
    with pytest.raises(ConfigError, match="x.js"):
        join_modules({"x.js": source, "y.js": "export const a = 1;"})


def test_modules_that_are_not_there_or_ask_in_a_circle_are_errors():
    with pytest.raises(ConfigError, match="lost.js, which is not there"):
        join_modules({"x.js": 'import { a } from "./lost.js";'})
    with pytest.raises(ConfigError, match="ask for each other"):
        join_modules(
            {
                "x.js": 'import { y } from "./y.js";\nexport const x = 1;',
                "y.js": 'import { x } from "./x.js";\nexport const y = 1;',
            }
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "out"
    write_static_folder(out)
    return out


def test_the_folder_is_whole_and_asks_nobody(folder):
    assert (folder / "page.js").is_file()
    for name in ("index.html", "docs.html"):
        html = (folder / name).read_text()
        for link in re.findall(r'(?:src|href)="([^"]*)"', html):
            assert (folder / link).is_file(), link
        policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
        assert policy is not None and "require-trusted-types-for" in policy.group(1)
        assert re.findall(r"<script\b[^>]*>(.*?)</script>", html, re.S) == ["", ""]
    script = (folder / "page.js").read_text()
    assert set(re.findall(r'^"([\w/]+\.js)": \(ask\)', script, re.M)) <= {
        path.relative_to(site.STATIC).as_posix() for path in site.static_paths()
    }


def test_a_folder_that_is_there_stays_as_it_is(folder, tmp_path, capsys):
    assert cli.main(["page", str(tmp_path)]) == 0  # it was empty
    assert cli.main(["page", str(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError):
        write_static_folder(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_the_folder_says_which_runs_it_has(tab_at, folder):
    tab = tab_at(f"file://{folder}/")
    tab.open("index.html#serving?replicas=2")
    tab.wait_for_text(".phase", "Recorded")
    tab.wait_for_text(".figures", "Goodput")
    tab.js("location.hash = '#serving?replicas=2&max_num_seqs=8'")
    tab.wait_for_text(".phase", "Not recorded")
    words = tab.text(".command code").split()
    assert words[:2] == ["octavo", "simulate"]
    cli.build_parser(words[1:]).parse_args(words[1:])


@pytest.mark.slow
def test_the_folder_works_from_disk(tab_at, folder):
    tab = tab_at(f"file://{folder}/")
    tab.open("index.html")
    drawn = "document.querySelector('.figures .figure') !== null"
    tab.wait_for(drawn)
    for picture in tab.js("[...document.querySelectorAll('#list a')].map((a) => a.dataset.id)"):
        tab.js(f"location.hash = '#{picture}'")
        here = "document.querySelector('#list [aria-current]').dataset.id"
        tab.wait_for(f"{drawn} && {here} === '{picture}'")
    tab.click("#navigation a", "Docs")
    tab.wait_for_text("#prose", "How inference works")
    image = "document.querySelector('#prose img')"
    tab.js(f"{image}.scrollIntoView()")
    tab.wait_for(f"{image}.naturalWidth === 736")
    tab.click("#list a", "Planning")
    tab.wait_for_text("#list [aria-current]", "Planning")
    links = tab.js("[...document.querySelectorAll('#navigation a')].map((a) => a.innerText)")
    assert links == ["Pictures", "Docs"]  # there is no engine to talk to


# -- recorded deployments -------------------------------------------------------------------------


@pytest.mark.slow
def test_documents_of_the_folder_are_those_of_the_server(tab, recording):
    tab.open()
    differing = tab.js(f"{COMPARE}({json.dumps(recording)}, {json.dumps(NAMES)})")
    assert differing == []


NAMES = [
    "llama-3.1-8b|H100 SXM|published|auto|1,1,1,1",
    "llama-3.3-70b|MI300X|fp8|auto|4,2,1,1",
    "gemma-3-12b|RTX 4090|Q4_K_M|fp8|2,1,1,1",
    "gemma-3-12b|M4 Max (40c)|published|fp8|1,1,1,1",
    "mixtral-8x7b|H100 SXM|published|auto|2,1,2,1",
    "gpt-oss-120b|H100 SXM|published|auto|1,1,8,8",
    "deepseek-v3|MI300X|published|auto|8,1,8,1",
    # Why these are impossible is the same, too.
    "llama-3.1-8b|H100 SXM|published|auto|2,1,2,1",
    "mixtral-8x7b|M4 Max (40c)|fp8|auto|2,1,1,1",
]
# Names of what the folder has that the server answers otherwise.
COMPARE = """
(async (recorded, names) => {
  const { askServer } = await import("/static/common/places.js");
  const { Recording } = await import("/static/pictures/recording.js");
  const recording = new Recording(recorded);
  const sorted = (value) => value === null || typeof value !== "object" ? value
    : Array.isArray(value) ? value.map(sorted)
    : Object.fromEntries(Object.keys(value).sort().map((name) => [name, sorted(value[name])]));
  const differing = [];
  for (const name of names) {
    const [model, hardware, precision, kv, degrees] = name.split("|");
    const [tp, pp, ep, dp] = degrees.split(",").map(Number);
    const body = {
      model, hardware, quantization: precision === "published" ? null : precision,
      kv_cache_dtype: kv === "auto" ? null : kv, layouts: [{ tp, pp, ep, dp }],
    };
    const { deployments: [found] } = await askServer("octavo/deployments", { body });
    const [ours, theirs] = [recording.of(name), found].map((each) => JSON.stringify(sorted(each)));
    if (ours !== theirs) differing.push([name, ours.slice(0, 300), theirs.slice(0, 300)]);
  }
  return differing;
})
"""


@pytest.fixture(scope="module")
def recording(folder):
    """The recorded deployments, as the page reads them."""
    script = (folder / "data.js").read_text()
    texts = json.loads(script.partition(" = ")[2].rstrip().rstrip(";"))
    return json.loads(texts["deployments.json"])


def test_the_folder_stays_small(folder, recording):
    assert (folder / "data.js").stat().st_size < 3.8e6  # a sixth are stages of pipelines
    usual = "llama-3.1-8b|H100 SXM|published|auto|1,1,1,1"
    assert isinstance(recording["deployments"][usual], list)
    # Each picture compares layouts that are recorded, whatever is chosen of them.
    for tp in recording["choices"]["tp"]:
        assert usual.replace("|1,", f"|{tp},") in recording["deployments"]


@pytest.mark.slow
def test_the_folder_offers_what_is_recorded(tab_at, folder, recording):
    tab = tab_at(f"file://{folder}/")
    tab.open("index.html#many-devices")
    tab.wait_for("document.querySelector('.figures .figure') !== null")
    options = """[...document.querySelectorAll(".controls select")]
        .map((select) => [...select.options].map((option) => option.text))"""
    models, precisions, kv_types, devices = tab.js(options)
    choices = recording["choices"]
    assert models == choices["model"] and devices == choices["hardware"]
    assert precisions == ["as published", "fp8", "Q4_K_M"] and kv_types == ["16 bits", "fp8"]
    tab.js("location.hash = '#many-devices?tp=4&pp=4&model=deepseek-v3&precision=fp8'")
    tab.wait_for_text(".command code", "octavo plan deepseek-v3 --hardware h100-sxm:16")
    tab.js("location.hash = '#many-devices?tp=4&pp=4&ep=4'")
    tab.wait_for_text(".error-box:not([hidden])", "not recorded in this folder")
    tab.js("location.hash = '#kv-growth?hardware=M4+Max+(40c)&tp=2'")
    tab.wait_for_text(".error-box:not([hidden])", "This cannot be: M4 Max (40c) has no link")


@pytest.mark.slow
def test_a_folder_says_who_computes_models_of_ones_own(tab_at, folder):
    tab = tab_at(f"file://{folder}/")
    tab.open("index.html#kv-growth?model=mine&own=q1YqLkksKVayUipKLVaqBQA")
    tab.wait_for_text(".is-own .problem", "octavo serve")
    tab.wait_for_text(".command code", "octavo plan llama-3.1-8b")
