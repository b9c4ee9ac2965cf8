// The page of pictures: a list of them, and the one that the address names.

import { element } from "../common/dom.js";
import { showNavigation } from "../common/navigation.js";
import { pictureAddress } from "../common/places.js";
import { forgetState, readState } from "../common/url_state.js";
import { Frame } from "./frame.js";
import { PICTURES } from "./index.js";
import { addPackedModel, loadWorld, readFor } from "./world.js";

const at = (id) => document.getElementById(id);
let frame = null;

function showList() {
  const links = PICTURES.map(({ id, title }) => element("li", {}, element("a", { href: pictureAddress(id), "data-id": id }, title)));
  at("list").replaceChildren(...links);
}

function namedPicture() {
  const { name } = readState();
  return PICTURES.find(({ id }) => id === name) ?? PICTURES[0];
}

/** What a picture says of itself, until all that it needs is there. */
function introduce({ title, sentences }) {
  const about = element("div", { class: "about" }, sentences.map((text) => element("p", {}, text)));
  at("picture").replaceChildren(element("h2", {}, title), about, element("p", { role: "status" }, "Models and devices are being loaded …"));
}

async function showPicture(world) {
  const picture = namedPicture();
  forgetState();
  await readFor(picture, world);
  const problem = await takeOwnModel(world);
  if (picture !== namedPicture()) return; // another picture was opened meanwhile
  const { values } = readState();
  frame?.close();
  frame = new Frame(at("picture"), picture, world, values, problem);
  document.title = `${picture.title} · octavo`;
  for (const link of at("list").querySelectorAll("a")) {
    const isHere = link.dataset.id === picture.id;
    if (isHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    if (isHere) link.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
}

/** Have the model that the address has in it, if there is one; what is wrong with it, in words. */
async function takeOwnModel(world) {
  const packed = readState().values.get("own");
  if (packed === null || [...world.models.values()].some((each) => each.packed === packed)) return "";
  return addPackedModel(world, packed).then(() => "", ({ message }) => message);
}

async function begin() {
  showNavigation("pictures");
  showList();
  introduce(namedPicture());
  await orSay(async () => {
    const world = await loadWorld();
    addEventListener("hashchange", () => orSay(async () => {
      await showPicture(world);
      scrollTo(0, 0);
      at("picture").focus();
    }));
    await showPicture(world);
  });
}

/** Do it, and say why where that fails. */
async function orSay(act) {
  try {
    await act();
  } catch (error) {
    frame?.close();
    at("picture").replaceChildren(element("p", { class: "error-box", role: "alert" }, `The pictures cannot be shown: ${error.message}`));
    throw error;
  }
}

begin();
