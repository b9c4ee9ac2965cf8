"""The pictures in a real browser: every control of each moved, at every size, in both themes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from octavo import cli
from octavo.cost.find_device import find_device
from octavo.page import site
from octavo.page.data import page_data
from octavo.server.api.octavo.simulations import SimulationRequest

pytestmark = pytest.mark.slow
PICTURES = re.findall(
    r'^  id: "([\w-]+)",$',
    "\n".join(path.read_text() for path in (site.STATIC / "pictures").glob("*.js")),
    re.M,
)
# Moves each control to its ends and somewhere between, and tells what is then not as it should be.
MOVE_ALL = """(async () => {
    const frame = () => new Promise((done) =>
        requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))));
    const frames = async () => { // until what was asked of the server is drawn
        await frame();
        while (picture.getAttribute("aria-busy") === "true") await frame();
    };
    const wrong = [];
    const check = (what) => {
        const text = picture.innerText;
        const odd = /NaN|undefined|\\[object|Infinity/.exec(text);
        if (odd) wrong.push(`${what}: ${text.slice(odd.index - 60, odd.index + 20)}`);
        for (const path of picture.querySelectorAll("path, rect, circle, text")) {
            const drawn = path.outerHTML;
            if (/NaN|undefined/.test(drawn)) wrong.push(`${what}: ${drawn.slice(0, 90)}`);
        }
    };
    const set = async (input, value, kind = "input") => {
        input.value = value;
        input.dispatchEvent(new Event(kind, {bubbles: true}));
        await frames();
        check(`${input.labels[0].innerText} = ${value}`);
    };
    for (const input of picture.querySelectorAll(".controls input[type=range]")) {
        const before = input.value;
        const middle = (Number(input.min) + Number(input.max)) / 2;
        for (const value of [input.min, input.max, middle, before]) await set(input, value);
    }
    for (const select of picture.querySelectorAll(".controls select")) {
        const before = select.value;
        const last = select.options.length - 1;
        const tried = new Set([0, Math.floor(last / 2), last, Number(before)]);
        for (const index of tried) await set(select, Math.min(last, index), "change");
    }
    for (const box of picture.querySelectorAll(".controls input[type=checkbox]")) {
        for (let time = 0; time < 2; time += 1) {
            box.click();
            await frames();
            check(`${box.labels[0].innerText} = ${box.checked}`);
        }
    }
    for (const button of picture.querySelectorAll(".controls button:enabled")) {
        button.click();
        await frames();
        check(button.innerText);
        if (button.innerText === "Pause") button.click();
    }
    return wrong;
})()"""


def show(tab, picture: str) -> None:
    """Open it, and wait until it has been drawn."""
    tab.open(f"pictures#{picture}")
    tab.wait_for("document.querySelector('.figures .figure, .error-box:not([hidden])') !== null")


def test_each_picture_is_in_the_list_once(tab):
    tab.open("pictures")
    links = tab.wait_for("[...document.querySelectorAll('#list a')].map((link) => link.dataset.id)")
    assert sorted(links) == sorted(PICTURES)
    assert len(set(links)) == len(links)


@pytest.mark.parametrize("picture", PICTURES)
def test_every_control_can_be_moved_at_any_size(tab, picture):
    tab.show(360, 780, touch=True)
    show(tab, picture)
    check_command(tab)
    check_names(tab)
    assert tab.js(MOVE_ALL) == []
    check_command(tab)
    assert tab.barriers() == []
    assert tab.lost_steps() == []
    check_tables(tab)


def check_command(tab) -> None:
    """octavo would take it."""
    if text := tab.text(".command code"):
        words = shlex.split(text)
        assert words[0] == "octavo"
        cli.build_parser(words[1:]).parse_args(words[1:])


def check_names(tab) -> None:
    """What can be used has a name, and says its value."""
    roles = ("button", "slider", "combobox", "checkbox", "link", "navigation")
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tab.call("Accessibility.getFullAXTree")["nodes"]
        if not node["ignored"] and node["role"]["value"] in roles
    ]
    assert len(named) > 5
    assert [role for role, name in named if not name] == []
    # A slider whose places are powers, or indices, says what they stand for.
    sliders = "[...document.querySelectorAll('input[type=range]')]"
    assert tab.js(f"{sliders}.every((slider) => slider.ariaValueText)")


def check_tables(tab) -> None:
    """Each chart has its figures as a table."""
    tab.js("document.querySelectorAll('figure.chart details').forEach((one) => (one.open = true))")
    tab.wait_for(
        "[...document.querySelectorAll('figure.chart')].every((chart) =>"
        " chart.querySelector('tbody td') !== null || !chart.querySelector('.layer *, .block'))"
    )


def test_the_keyboard_is_enough(tab):
    show(tab, "memory-wall")
    tab.js("document.querySelector('.controls input[type=range]').focus()")
    before = tab.text(".figure-value")
    tab.press("End")
    tab.wait_for("document.querySelector('.controls output').textContent === '4,096 requests'")
    tab.js("document.querySelector('.chart-stage').focus()")
    tab.press("ArrowRight")
    tab.wait_for_text("#picture .chart:first-child .chart-tip", "reading weights")
    spoken = "document.querySelector('.chart [role=status]').textContent"
    first = tab.js(spoken)
    assert first.startswith("1,")
    tab.press("ArrowRight")
    assert tab.js(spoken) != first
    tab.press("Escape")
    assert tab.js("document.querySelector('.chart-tip').hidden")
    assert before == tab.text(".figure-value")  # the ridge is the device's


def test_an_address_shows_the_same_again(tab):
    show(tab, "kv-growth")
    tab.js("""{
        const users = [...document.querySelectorAll('.control')]
            .find((control) => control.innerText.startsWith('Requests at once'));
        const input = users.querySelector('input');
        input.value = 300;
        input.dispatchEvent(new Event('input'));
    }""")
    tab.wait_for("location.hash.includes('users=')")
    figures, address = tab.text(".figures"), tab.js("location.hash")
    tab.open("docs/inference")
    tab.open(f"pictures{address}")
    tab.wait_for("document.querySelector('.figures .figure') !== null")
    assert tab.text(".figures") == figures
    tab.js("location.hash = '#paged-kv?step=3&size=2&nonsense=1'")
    tab.wait_for_text("h2", "Paged KV cache")
    tab.wait_for_text(".controls", "3 of")
    tab.js("location.hash = '#kv-growth?users=many&model=none&context=1e99'")
    tab.wait_for_text("h2", "KV cache growth")
    tab.wait_for_text(".controls", "16 requests")


def test_what_stays_the_same_is_not_drawn_again(tab):
    show(tab, "serving")
    first_shapes = "[...document.querySelectorAll('.chart-svg')].map((svg) => svg.firstChild)"
    tab.wait_for("document.querySelectorAll('.layer path').length === 11")  # all curves
    tab.js(f"globalThis.before = {first_shapes}; 0")
    tab.js("""{
        const input = [...document.querySelectorAll('.controls input[type=range]')]
            .find((one) => one.labels[0].innerText === 'First token within');
        input.value = 0;
        input.dispatchEvent(new Event('input'));
    }""")
    tab.wait_for(f"{first_shapes}[0] !== before[0]")  # goodput, whose limit that is
    is_new = tab.js(f"{first_shapes}.map((shape, at) => shape !== before[at])")
    assert is_new == [True, True, False, False, False, True, False]


def test_recorded_runs_are_shown_until_the_server_has_simulated(tab, site):
    tab.open("docs/inference")  # nothing is known from before
    site.simulating.clear()
    try:
        show(tab, "serving")
        tab.wait_for_text(".phase", "Recorded")
        tab.wait_for_text(".phase", "The server simulates it")
        assert "llama-3.1-8b on H100 SXM" in tab.text(".phase")
        tab.wait_for("document.querySelectorAll('.layer path').length === 11")
        assert "recorded by octavo" in tab.text(".figures")
    finally:
        site.simulating.set()
    tab.wait_for_text(".phase", "Simulated by this server")


def test_a_picture_says_what_it_is_about_before_its_data_is_there(tab, site):
    tab.open("docs/inference")
    site.deployed.clear()
    try:
        tab.open("pictures#kv-growth")
        tab.wait_for_text("#picture h2", "KV cache growth")
        assert "are being loaded" in tab.text("#picture [role=status]")
    finally:
        site.deployed.set()
    tab.wait_for("document.querySelector('.figures .figure') !== null")


def test_settings_are_kept_to_be_compared_with(tab):
    show(tab, "serving?replicas=2")
    tab.wait_for_text(".chart-legend", "kept settings")
    tab.click(".is-kept button", "Keep these settings")
    tab.wait_for_text(".is-kept output", "2 replicas")
    tab.wait_for("!document.querySelector('.chart-legend').innerText.includes('kept')")
    tab.wait_for("location.hash.includes('kept=continuous%2Ctrue%2C2048%2C32%2C2')")
    tab.js("location.hash = '#serving?max_num_seqs=8&kept=continuous,true,2048,32,4'")
    tab.wait_for_text(".is-kept output", "4 replicas")
    tab.js("location.hash = '#serving?max_num_seqs=128&kept=nonsense'")
    tab.wait_for_text(".is-kept output", "1 replica")


def test_what_cannot_be_is_said(tab):
    tab.open("pictures#kv-growth?hardware=M2+Max&tp=8")
    tab.wait_for("document.querySelector('.error-box:not([hidden])') !== null")
    assert "This cannot be: M2 Max has no link" in tab.text(".picture .error-box")
    assert not tab.js("document.querySelector('.figures').checkVisibility()")


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def test_a_model_of_ones_own(tab, tmp_path):
    show(tab, "kv-growth")
    for text, said in (("[]", "not a JSON object"), ("{", "not a JSON object")):
        give_file(tab, tmp_path, text)
        tab.wait_for_text(".is-own .problem", said)
    give_file(tab, tmp_path, json.dumps(CONFIG))
    tab.wait_for_text(".command code", "octavo plan config.json")
    # 2 layers, a key and a value of 2 heads of 16, in 16 bits
    assert tab.js("document.querySelector('.figure-value').innerText") == "256 B"
    check_an_address_has_it(tab)


def check_an_address_has_it(tab) -> None:
    """Wherever it is opened; one that is broken says so."""
    tab.wait_for("location.hash.includes('own=')")
    address = tab.js("location.hash")
    tab.open("docs/inference")
    tab.open(f"pictures{address}")
    tab.wait_for_text(".command code", "octavo plan config.json")
    assert tab.js("document.querySelector('.figure-value').innerText") == "256 B"
    tab.open("docs/inference")
    tab.open("pictures#kv-growth?model=mine&own=AAAA")
    tab.wait_for_text(".is-own .problem", "The model in this address cannot be read")
    tab.wait_for_text(".command code", "octavo plan llama-3.1-8b")


def test_a_model_that_is_too_large_for_an_address(tab, tmp_path):
    show(tab, "kv-growth")
    labels = {str(index): f"class {index * 7919 % 10007}" for index in range(3000)}
    give_file(tab, tmp_path, json.dumps({**CONFIG, "id2label": labels}))
    tab.wait_for_text(".is-own .problem", "too large for an address")
    tab.wait_for_text(".command code", "octavo plan config.json")


def test_a_model_of_ones_own_and_any_number_is_simulated(tab, site, tmp_path):
    show(tab, "serving?max_num_seqs=50")
    give_file(tab, tmp_path, json.dumps(CONFIG))
    tab.wait_for_text(".command code", "octavo simulate config.json")
    tab.wait_for_text(".phase", "llama (config.json) on H100 SXM")
    asked = site.simulated[-2:]
    assert [each["config"] for each in asked] == [CONFIG, CONFIG]
    assert {each["max_num_seqs"] for each in asked} == {32, 50}  # the kept ones, and these
    settings = {name: value for name, value in asked[0].items() if value is not None}
    SimulationRequest.model_validate(settings)


def give_file(tab, folder: Path, text: str) -> None:
    """To the picture's file input, as somebody who picks it."""
    (folder / "config.json").write_text(text)
    root = tab.call("DOM.getDocument")["root"]["nodeId"]
    node = tab.call("DOM.querySelector", nodeId=root, selector="#own-model")["nodeId"]
    tab.call("DOM.setFileInputFiles", nodeId=node, files=[str(folder / "config.json")])


def test_reading_a_chart_with_the_pointer(tab):
    show(tab, "memory-wall")
    box = tab.wait_for("""(() => {
        const stage = document.querySelector('.chart-stage');
        stage.scrollIntoView({block: 'center'});
        const {x, y, width, height} = stage.getBoundingClientRect();
        return [x + width / 2, y + height / 2];
    })()""")
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])
    tab.wait_for_text("#picture .chart:first-child .chart-tip", "multiplying")
    assert tab.overflowing(".chart-stage") == []


def test_names_of_hardware_in_commands_are_known(tab):
    """As pictures write them, for every device."""
    show(tab, "memory-wall")
    names = page_data()["devices"]
    options = tab.js("[...document.querySelectorAll('select')][3].options.length")
    assert options == len(names)
    written = tab.js("""(async () => {
        const select = [...document.querySelectorAll('select')][3];
        const found = [];
        for (let index = 0; index < select.options.length; index += 1) {
            select.value = index;
            select.dispatchEvent(new Event('change'));
            do await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
            while (picture.getAttribute("aria-busy") === "true");
            found.push(/--hardware (\\S+)/.exec(document.querySelector('.command').innerText)?.[1]);
        }
        return found;
    })()""")
    for name, word in zip(names, written, strict=True):
        if word is not None:  # what cannot be on a device has no command
            assert find_device(word)[0].name == name
