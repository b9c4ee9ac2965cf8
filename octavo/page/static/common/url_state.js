// What a page shows, in its address: `#name?a=1&b=2`, so that it can be shared.

const PAUSE = 250; // milliseconds: browsers refuse an address that changes with every frame

let timer = null;

/** `{ name, values: URLSearchParams }` of the address as it is. */
export function readState() {
  const [name, query = ""] = location.hash.slice(1).split("?");
  return { name: decodeURIComponent(name), values: new URLSearchParams(query) };
}

/** Put it into the address, without a step back; `values` is an object of what is not as usual. */
export function writeState(name, values) {
  clearTimeout(timer);
  timer = setTimeout(() => history.replaceState(null, "", stateText(name, values)), PAUSE);
}

export function stateText(name, values) {
  const query = new URLSearchParams(values).toString();
  return `#${name}${query && `?${query}`}`;
}

/** Another address has come: what was waiting to be written is of the one before. */
export function forgetState() {
  clearTimeout(timer);
}
