// Server-sent events from bytes, however the network has cut them.

/**
 * Feed it bytes with `push`, which returns the events that are complete by now:
 * `{ event, data }`. Lines may end in LF, CRLF or CR, and a cut may lie anywhere, inside a
 * character or between CR and LF too. Comments, ids and retry times are skipped.
 */
export class SseParser {
  #decoder = new TextDecoder("utf-8"); // keeps the bytes of an unfinished character
  #line = ""; // what has come of a line whose end has not
  #endedInCr = false; // so that an LF to come ends nothing
  #data = [];
  #event = "";

  push(bytes) {
    const events = [];
    let text = this.#decoder.decode(bytes, { stream: true });
    if (this.#endedInCr && text !== "") {
      if (text[0] === "\n") text = text.slice(1);
      this.#endedInCr = false;
    }
    let start = 0;
    for (const end of text.matchAll(/\r\n|\n|\r/g)) {
      this.#takeLine(this.#line + text.slice(start, end.index), events);
      this.#line = "";
      start = end.index + end[0].length;
    }
    this.#endedInCr = text.endsWith("\r");
    this.#line += text.slice(start);
    return events;
  }

  #takeLine(line, events) {
    if (line === "") {
      if (this.#data.length > 0) {
        events.push({ event: this.#event || "message", data: this.#data.join("\n") });
      }
      this.#data = [];
      this.#event = "";
      return;
    }
    const colon = line.indexOf(":");
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + (line[colon + 1] === " " ? 2 : 1));
    if (field === "data") this.#data.push(value);
    else if (field === "event") this.#event = value;
  }
}
