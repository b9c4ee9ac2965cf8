// A document of octavo's, as its Markdown says it, with what else there is beside it.

import { copy } from "../common/clipboard.js";
import { element } from "../common/dom.js";
import { renderInto } from "../common/markdown.js";
import { showNavigation } from "../common/navigation.js";
import { documentAddress, documentName, pictureAddress, readJson, readText } from "../common/places.js";

const at = (id) => document.getElementById(id);
const name = documentName();

/** Where a link of a document leads here; null for what is not on the page. */
function linkTo(titles, target) {
  const picture = /^\.\.\/pictures#([\w-]+(?:\?[\w=&.-]*)?)$/.exec(target);
  if (picture) return pictureAddress(...picture[1].split("?"));
  if (target.startsWith("#")) return target;
  const [, other, section = ""] = /^([\w-]+)\.md(#[\w-]+)?$/.exec(target) ?? [];
  return other in titles ? documentAddress(other + section) : null;
}

/** Headings get the names that GitHub gives them, so that the same links work there. */
function nameHeadings(prose) {
  for (const heading of prose.querySelectorAll("h3, h4, h5, h6")) {
    const words = heading.textContent.toLowerCase().replace(/[^\p{L}\p{N}\s_-]/gu, "");
    heading.id = words.trim().replace(/\s/g, "-");
  }
}

function showList(titles) {
  const items = Object.entries(titles).map(([other, title]) =>
    element("li", {}, element("a", { href: documentAddress(other), "aria-current": other === name ? "page" : null }, title)));
  at("list").replaceChildren(...items);
}

async function begin() {
  showNavigation("docs");
  try {
    const titles = await readJson("docs.json");
    showList(titles);
    renderInto(at("prose"), await readText(`docs/${name}.md`), { linkTo: (target) => linkTo(titles, target) });
    document.title = `${titles[name]} · octavo`;
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
