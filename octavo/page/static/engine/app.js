// The dashboard: a ring that the engine's events fill, and one frame of it that is shown.

import { Chart } from "../charts/chart.js";
import { curves } from "../charts/curves.js";
import { lanes } from "../charts/lanes.js";
import { loadKey, saveKey } from "../chat/settings.js";
import { onceAFrame } from "../common/dom.js";
import { showNavigation } from "../common/navigation.js";
import { format } from "../common/numbers.js";
import { batches, memory, queue, roofline, throughput } from "./charts.js";
import { follow } from "./feed.js";
import { KvMap } from "./kv_map.js";
import { Replicas, showReplicas } from "./replicas.js";
import { FRAME_SECONDS, MOST_FRAMES, lately } from "./ring.js";
import { figures, hitRate, showEnded, showFigures, showNotes, showPrefixes } from "./tables.js";

const at = (id) => document.getElementById(id);
const seconds = () => performance.now() / 1000;

const replicas = new Replicas();
const charts = {
  throughput: new Chart(at("throughput"), curves),
  queue: new Chart(at("queue"), curves),
  batches: new Chart(at("batches"), lanes),
  roofline: new Chart(at("roofline"), curves),
  memory: new Chart(at("memory"), lanes),
};
const map = new KvMap(at("kv"));
let paused = null; // the frames as they were, while they are looked at
let shownPrefixes = null;
let shownAbout = null;
let shownList = null;

// -- what is shown -----------------------------------------------------------------------------

const show = onceAFrame(() => {
  const frames = paused ?? replicas.ring.frames;
  if (frames.length === 0 || document.hidden) return;
  const back = Math.min(Number(at("scrub").value), frames.length - 1);
  const index = frames.length - 1 - back;
  showTime(frames, index);
  showFrame(frames, index);
});

function showTime(frames, index) {
  const age = frames.at(-1).at - frames[index].at;
  at("scrub").max = frames.length - 1;
  at("when").textContent = age < FRAME_SECONDS ? "now" : `${Math.round(age)} s back`;
  at("scrub").setAttribute("aria-valuetext", at("when").textContent);
}

function showFrame(frames, index) {
  const frame = frames[index];
  const shown = frames.slice(0, index + 1);
  at("state").textContent = frame.state;
  at("state").classList.toggle("is-bad", frame.state !== "ready");
  showFigures(at("figures"), figures(frames, index, replicas.ring.about));
  charts.throughput.show(throughput(shown, frame.at));
  charts.queue.show(queue(shown, frame.at));
  charts.batches.show(batches(frame.looks));
  map.show(frame.pool);
  showCache(frame);
  showRoofline(frame.last, lately(frames, index, 5).flatMap(({ steps }) => steps).slice(-64));
  showCosts(frames, index);
  showNotes(at("notes"), frames, index);
}

function showCache({ last, prefixes }) {
  at("hit-rate").textContent = last?.prefix_tokens_queried
    ? `${hitRate(last)} of the prompt tokens were found here since the engine began.` : "No prompt has been looked up here yet.";
  if (prefixes === shownPrefixes) return;
  shownPrefixes = prefixes;
  showPrefixes(at("prefixes"), prefixes, replicas.ring.about?.block_size ?? 1);
}

function showRoofline(last, steps) {
  charts.roofline.show(roofline(steps));
  at("bound").textContent = last === null || steps.length === 0 ? "No step lately."
    : last.roofline_share === null ? "What the device can do is not known: octavo hardware show auto measures it."
    : boundOf(last, steps);
}

function boundOf(last, steps) {
  const limits = ["memory", "compute", "overhead"].map((name) => [name, steps.at(-1)[`num_${name}_bound`] - steps[0][`num_${name}_bound`]]);
  const [limit] = limits.reduce((most, each) => (each[1] > most[1] ? each : most));
  return `Most of the last steps were bound by ${limit}; the last one took ${format(last.seconds, "s")}, ${format(last.roofline_share, "%")} of which the device needs.`;
}

function showCosts(frames, index) {
  const usdPerHour = Number(at("price").value) || null;
  const ended = showEnded(at("ended"), frames, index, usdPerHour);
  const busy = ended.filter(({ device_seconds }) => device_seconds !== null);
  const total = busy.reduce((sum, { device_seconds }) => sum + device_seconds, 0);
  at("cost").textContent = [
    ended.length === 0 ? "No request has ended yet." : "",
    busy.length > 0 ? `Requests took ${format(total / busy.length, "s")} of the device on average (${format(busy.length, "requests")}).` : "",
    "A request's time is its share, by tokens, of the steps that it took part in; idle time is not counted.",
  ].filter(Boolean).join(" ");
}

function showAbout() {
  const { ring } = replicas;
  const { about } = ring;
  if (about === null || about === shownAbout) return;
  if (shownAbout === null && about.num_restarts > 0) ring.note(`restarts of the engine before this page was opened: ${about.num_restarts}`);
  shownAbout = about;
  at("model-name").textContent = about.model;
  at("memory").parentElement.hidden = !about.memory;
  if (about.memory) charts.memory.show(memory(about.memory));
  if (about.usd_per_hour && at("price").value === "") at("price").value = about.usd_per_hour[0];
}

function showList() {
  const key = JSON.stringify([replicas.list, replicas.shown]);
  if (key === shownList) return; // a button that has the focus keeps it
  shownList = key;
  at("replicas").parentElement.parentElement.hidden = replicas.list.length === 0;
  const focused = document.activeElement?.getAttribute("aria-label");
  showReplicas(at("replicas"), replicas, (number) => {
    replicas.show(number);
    setPaused(false);
    showList();
  });
  if (focused) at("replicas").querySelector(`[aria-label="${focused}"]`)?.focus();
}

// -- time --------------------------------------------------------------------------------------

setInterval(() => {
  showAbout();
  showList();
  replicas.close(seconds());
  if (paused === null) show();
}, FRAME_SECONDS * 1000);

function setPaused(isPaused) {
  paused = isPaused ? [...replicas.ring.frames] : null;
  at("pause").setAttribute("aria-pressed", String(isPaused));
  at("pause").textContent = isPaused ? "Go on" : "Pause";
  if (!isPaused) at("scrub").value = 0;
  show();
}

at("pause").addEventListener("click", () => setPaused(paused === null));
at("scrub").addEventListener("input", () => {
  if (paused === null) setPaused(true);
  show();
});
at("price").addEventListener("input", show);
at("export").addEventListener("click", () => {
  const { about, frames } = replicas.ring;
  const content = { about, replica: replicas.shown, frame_seconds: FRAME_SECONDS, most_frames: MOST_FRAMES, frames: paused ?? frames };
  const address = URL.createObjectURL(new Blob([JSON.stringify(content)], { type: "application/json" }));
  const link = document.createElement("a");
  [link.href, link.download] = [address, "octavo-engine.json"];
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
});
document.addEventListener("visibilitychange", show);

// -- the engine --------------------------------------------------------------------------------

function askForKey({ status }) {
  const dialog = at("key-dialog");
  at("key-text").textContent = status === 403 ? "What concerns all clients is shown to the operator: give the admin key of this server."
    : loadKey() ? "The server did not accept this API key." : "This server asks for an API key.";
  at("key").value = "";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => setTimeout(done, 200), { once: true }));
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey(at("key").value.trim());
  at("key-dialog").close();
});
at("key-dialog").querySelector(".close").addEventListener("click", () => at("key-dialog").close());

showNavigation("engine");
follow(loadKey, {
  event: (event) => replicas.take(event),
  lost: (error) => replicas.note(error === null ? "the server ended the stream" : "the connection was lost", "not connected"),
  key: askForKey,
});
