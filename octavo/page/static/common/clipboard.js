// Copying, with a word about it on the button.

const LABEL = "Copy";

/** Put `text` on the clipboard, and say on `button` for a moment whether that went well. */
export async function copy(text, button) {
  const hasCopied = await write(text);
  if (button.textContent !== LABEL) return; // a second click: it says so already
  button.textContent = hasCopied ? "Copied" : "Not allowed";
  setTimeout(() => (button.textContent = LABEL), 1500);
}

async function write(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Browsers offer the clipboard on https and localhost only; elsewhere there is the old way.
    return writeBySelection(text);
  }
}

function writeBySelection(text) {
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "unseen";
  document.body.append(area);
  area.select();
  const hasCopied = document.execCommand("copy");
  area.remove();
  return hasCopied;
}
