// Objects as texts that are short enough for an address: JSON, deflated, in base64 of addresses.

const MOST = 4000; // letters of a text

/** Null of an object that is too large for that. */
export async function pack(object) {
  const bytes = await through(new CompressionStream("deflate-raw"), new TextEncoder().encode(JSON.stringify(object)));
  if (bytes.length > 0.75 * MOST) return null;
  return btoa(String.fromCharCode(...bytes)).replaceAll("+", "-").replaceAll("/", "_").replace(/=+$/, "");
}

/** Throws an Error of a text that is none of these. */
export async function unpack(text) {
  if (text.length > MOST) throw new Error("It is too long.");
  const bytes = Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (each) => each.charCodeAt(0));
  return JSON.parse(new TextDecoder().decode(await through(new DecompressionStream("deflate-raw"), bytes)));
}

async function through(stream, bytes) {
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer());
}
