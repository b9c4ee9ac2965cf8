// The links between the pages, the same on each.

import { element } from "./dom.js";
import { PAGES } from "./places.js";

const TITLES = { chat: "Chat", engine: "Engine", pictures: "Pictures", docs: "Docs" };

/** Fill the page's `#navigation`; `here` is the name of the page itself. */
export function showNavigation(here) {
  const links = Object.entries(PAGES).map(([name, href]) =>
    element("a", { href, "aria-current": name === here ? "page" : null }, TITLES[name]),
  );
  document.getElementById("navigation").replaceChildren(...links);
}
