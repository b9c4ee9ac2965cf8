// What the dashboard shows in words and rows: figures, the tree of prefixes, requests, notes.

import { element } from "../common/dom.js";
import { format } from "../common/numbers.js";
import { quantile, quantileOfBuckets } from "./quantiles.js";
import { FRAME_SECONDS, gapsOf, lately } from "./ring.js";

const MOST_ROWS = 50;

/** `[[name, value]]`: rates of the last 5 seconds, percentiles of the last minute. */
export function figures(frames, index, about) {
  const { last } = frames[index];
  const few = lately(frames, index, 5);
  const minute = lately(frames, index, 60);
  const rate = (name) => few.reduce((sum, frame) => sum + frame[name], 0) / (few.length * FRAME_SECONDS);
  const gaps = gapsOf(minute);
  const firsts = minute.flatMap(({ ttfts }) => ttfts);
  const both = (find) => `${format(find(0.5), "s")} · ${format(find(0.99), "s")}`;
  const total = about?.num_blocks;
  return [
    ["running · waiting", `${last?.num_running ?? 0} · ${last?.num_waiting ?? 0}`],
    ["prompt tokens/s", format(rate("tokensIn"))],
    ["answer tokens/s", format(rate("tokensOut"))],
    ["TTFT p50 · p99", both((q) => quantile(firsts, q))],
    ["ITL p50 · p99", both((q) => quantileOfBuckets(gaps, q))],
    ["KV blocks used", last && total ? format(last.num_used_blocks / total, "%") : "–"],
    ["prefix hit rate", hitRate(last)],
    ["preemptions", format(last?.num_preemptions ?? 0)],
    ["draft tokens accepted", last?.draft_tokens ? format(last.draft_tokens_accepted / last.draft_tokens, "%") : "–"],
  ];
}

export function hitRate(last) {
  return last?.prefix_tokens_queried ? format(last.prefix_tokens_hit / last.prefix_tokens_queried, "%") : "–";
}

export function showFigures(list, all) {
  list.replaceChildren(...all.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

/** Parts `[before, blocks, with all that follows, hits]` as nested lists. */
export function showPrefixes(container, parts, blockSize) {
  const lists = [element("ul", { class: "tree" })];
  const most = Math.max(1, ...parts.map(([, , size]) => size));
  parts.forEach(([before, length, size, hits], index) => {
    const bar = element("i", { class: "amount" });
    bar.style.width = `${Math.max(2, (45 * size) / most)}%`;
    const text = `${format(length * blockSize)} tokens · ${format(hits)} ${hits === 1 ? "hit" : "hits"}`;
    const item = element("li", {}, element("span", {}, bar, text));
    lists[index + 1] = element("ul", { class: "tree" });
    if (parts.some(([parent]) => parent === index)) item.append(lists[index + 1]);
    lists[before + 1].append(item);
  });
  container.replaceChildren(parts.length > 0 ? lists[0] : element("p", { class: "hint" }, "Nothing is cached yet."));
}

const HEAD = ["request", "ended by", "prompt", "cached", "answer", "draft · accepted", "TTFT", "TPOT", "time on the device", "cost"];

/** The last requests that have ended by then, the latest first. */
export function showEnded(table, frames, index, usdPerHour) {
  const ended = frames.slice(0, index + 1).flatMap((frame) => frame.ended).slice(-MOST_ROWS).reverse();
  const rows = ended.map((one) => [
    one.id, one.reason, format(one.num_prompt_tokens), format(one.num_cached_tokens), format(one.num_output_tokens),
    one.num_draft_tokens ? `${one.num_draft_tokens} · ${one.num_accepted_tokens}` : "–",
    format(one.ttft, "s"), format(one.tpot, "s"), format(one.device_seconds, "s"),
    usdPerHour && one.device_seconds !== null ? dollars((one.device_seconds * usdPerHour) / 3600) : "–",
  ]);
  table.hidden = ended.length === 0;
  table.replaceChildren(
    element("thead", {}, element("tr", {}, HEAD.map((text) => element("th", { scope: "col" }, text)))),
    element("tbody", {}, rows.map(([first, ...rest]) =>
      element("tr", {}, element("th", { scope: "row" }, first), rest.map((text) => element("td", {}, text))))),
  );
  return ended;
}

/** Millionths of a dollar are what one request costs. */
function dollars(value) {
  return value >= 0.01 ? `$${value.toFixed(2)}` : `${format(value * 1e6)} µ$`;
}

export function showNotes(list, frames, index) {
  const notes = frames.slice(0, index + 1).flatMap(({ at, notes }) => notes.map((text) => [at, text])).slice(-MOST_ROWS).reverse();
  list.replaceChildren(...notes.map(([at, text]) => element("li", {}, `${Math.round(frames[index].at - at)} s before: ${text}`)));
  if (notes.length === 0) list.append(element("li", {}, "None in the last five minutes."));
}
