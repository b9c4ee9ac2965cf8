// What pictures ask the server for: once, and not before a control rests.

import { askServer } from "../common/places.js";

const REST = 250; // milliseconds in which nothing else is asked
const MOST_KEPT = 64; // answers, of which the oldest are forgotten

const asked = new Map(); // by topic: the question that has no answer yet
const known = new Map(); // by question: `{ answer }`, or `{ state }` with its topic

/**
 * What the server says to a question, `{ answer }`, or why that is not there, in words: `{ state,
 * isWaiting }`. `question` is `{ path, body, waiting, failed, rest }`: what is said while it waits, and
 * before what was wrong; and for how long nothing else must be asked. A topic has one question: another
 * one takes its place, and what is under way is given up. What has failed is asked again after another one.
 */
export function answerOf(topic, question, { redraw }) {
  const key = `${question.path} ${JSON.stringify(question.body)}`;
  if (known.has(key)) return known.get(key);
  const under = [...asked.values()].find((each) => each.key === key);
  if (under) under.redraw = redraw; // the picture that is shown now
  else putQuestion(topic, key, question, redraw);
  return { state: question.waiting, isWaiting: true };
}

function putQuestion(topic, key, question, redraw) {
  asked.get(topic)?.giveUp();
  for (const [other, found] of known) if (found.state && found.topic === topic) known.delete(other);
  const entry = { key, redraw };
  entry.giveUp = begin(question, (found) => {
    asked.delete(topic);
    if (known.size >= MOST_KEPT) known.delete(known.keys().next().value);
    known.set(key, { ...found, topic });
    entry.redraw();
  });
  asked.set(topic, entry);
  redraw(); // of other topics, which may have waited for the one that was given up
}

/** Returns how to have it not asked, or not answered any more. */
function begin({ path, body, failed, rest = REST }, note) {
  const leaving = new AbortController();
  const { signal } = leaving;
  const timer = setTimeout(() => askServer(path, { body, signal })
    .then((answer) => note({ answer }))
    .catch(({ message }) => signal.aborted || note({ state: `${failed}: ${message}` })), rest);
  return () => {
    clearTimeout(timer);
    leaving.abort();
  };
}
