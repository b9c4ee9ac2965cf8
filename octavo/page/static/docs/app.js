// A document of octavo's, as its Markdown says it, with what else there is beside it.

import { copy } from "../common/clipboard.js";
import { element } from "../common/dom.js";
import { renderInto } from "../common/markdown.js";
import { showNavigation } from "../common/navigation.js";
import { documentAddress, documentName, imageAddress, pictureAddress, readJson, readText } from "../common/places.js";

const COMMENTS = /^<!--.*-->\n/gm; // where scripts write what they have measured

const at = (id) => document.getElementById(id);

/** Where links and images of a document lead; of links to files that are not here, only the words are shown.
 * Its title is below that of the page. */
function placesOf({ titles, images }) {
  return {
    below: 1,
    link: (target) => linkTo(titles, target),
    image: (target) => {
      const [width, height] = images[target] ?? [];
      return width === undefined ? null : { src: imageAddress(target), width, height };
    },
  };
}

function linkTo(titles, target) {
  const picture = /^\.\.\/pictures#([\w-]+(?:\?[\w=&.-]*)?)$/.exec(target);
  if (picture) return pictureAddress(...picture[1].split("?"));
  if (target.startsWith("#")) return target;
  const [, other, section = ""] = /^([\w-]+)\.md(#[\w-]+)?$/.exec(target) ?? [];
  if (other in titles) return documentAddress(other + section);
  return target.startsWith("https://") ? target : "";
}

/** Headings get the names that GitHub gives them, so that the same links work there. */
function nameHeadings(prose) {
  for (const heading of prose.querySelectorAll("h2, h3, h4, h5, h6")) {
    const words = heading.textContent.toLowerCase().replace(/[^\p{L}\p{N}\s_-]/gu, "");
    heading.id = words.trim().replace(/\s/g, "-");
  }
}

function showList(titles, here) {
  const items = Object.entries(titles).map(([name, title]) =>
    element("li", {}, element("a", { href: documentAddress(name), "aria-current": name === here ? "page" : null }, title)));
  at("list").replaceChildren(...items);
  at("list").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" }); // on a phone
}

async function begin() {
  showNavigation("docs");
  try {
    const known = await readJson("docs.json");
    const name = documentName() ?? Object.keys(known.titles)[0];
    showList(known.titles, name);
    const source = await readText(`docs/${name}.md`);
    renderInto(at("prose"), source.replace(COMMENTS, ""), { places: placesOf(known) });
    document.title = `${known.titles[name]} · octavo`;
  } catch (error) {
    at("prose").replaceChildren(element("p", { class: "error-box", role: "alert" }, `This document cannot be shown: ${error.message}`));
    throw error;
  }
  nameHeadings(at("prose"));
  document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

at("prose").addEventListener("click", ({ target }) => {
  if (target.classList.contains("copy-code")) copy(target.closest(".code-box").querySelector("pre").textContent, target);
});
begin();
