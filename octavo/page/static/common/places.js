// Where things are: on a server, or in the folder that `octavo page` writes. In the folder a script
// has put every text that the page reads into `octavoFiles`, as files cannot be fetched from disk.

const texts = globalThis.octavoFiles;
const base = document.documentElement.dataset.base; // the way to where the page begins

export const isFolder = texts !== undefined;

/** The pages by name; a folder has no engine to talk to or look at. */
export const PAGES = isFolder
  ? { pictures: "index.html", docs: "docs.html" }
  : { chat: `${base}/`, engine: `${base}/engine`, pictures: `${base}/pictures`, docs: `${base}/docs` };

/** The address of a picture, with what it begins with: `name=value&…`. */
export function pictureAddress(id, state = "") {
  return `${PAGES.pictures}#${id}${state && `?${state}`}`;
}

/** The address of a document, "name" or "name#section". */
export function documentAddress(place) {
  if (!isFolder) return `${base}/docs/${place}`;
  const [name, section] = place.split("#");
  return `docs.html?name=${name}${section === undefined ? "" : `#${section}`}`;
}

/** The address of an image of documents, by its path beside them. */
export function imageAddress(path) {
  return isFolder ? `docs/${path}` : `${base}/static/docs/${path}`;
}

/** The name of the document that the address asks for; null for the first. */
export function documentName() {
  if (isFolder) return new URLSearchParams(location.search).get("name");
  return location.pathname.split("/").at(-1);
}

/** The text of a file below `static/`. Throws what `fetch` throws, or an Error with the status. */
export async function readText(path) {
  if (isFolder) {
    if (!(path in texts)) throw new Error(`${path} is not in this folder.`);
    return texts[path];
  }
  const answer = await fetch(`${base}/static/${path}`);
  if (!answer.ok) throw new Error(`${path}: ${answer.status} ${answer.statusText}`);
  return answer.text();
}

/** What the server answers, to a JSON `body` if there is one; throws an Error with its message. */
export async function askServer(path, { body, signal } = {}) {
  const headers = body === undefined ? {} : { "Content-Type": "application/json" };
  const key = sessionStorage.getItem("octavo.key"); // as the chat was given it
  if (key) headers.Authorization = `Bearer ${key}`;
  const method = body === undefined ? "GET" : "POST";
  const answer = await fetch(`${base}/${path}`, { method, headers, signal, body: JSON.stringify(body) });
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error?.message ?? `${answer.status} ${answer.statusText}`);
  return said;
}

export async function readJson(path) {
  return JSON.parse(await readText(path));
}
