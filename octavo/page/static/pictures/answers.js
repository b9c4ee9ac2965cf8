// What pictures ask the server for: once, and not before a control rests.

import { askServer } from "../common/places.js";

const REST = 250; // milliseconds in which nothing else is asked

const asked = new Map(); // by topic: the question that has no answer yet

/**
 * What the server says to a question, `{ answer }`, or why that is not there, in words: `{ state,
 * isWaiting }`. `question` is `{ path, body, waiting, failed }`: what is said while it waits, and
 * before what was wrong. A topic has one question: another one takes its place, and what is under way is given up.
 */
export function answerOf(topic, question, { world: { files }, redraw }) {
  const key = `${question.path} ${JSON.stringify(question.body)}`;
  if (files.has(key)) return files.get(key);
  if (![...asked.values()].some((each) => each.key === key)) {
    asked.get(topic)?.giveUp();
    const note = (found) => {
      asked.delete(topic);
      files.set(key, found);
      redraw();
    };
    asked.set(topic, { key, giveUp: begin(question, note) });
    redraw(); // of other topics, which may have waited for the one that was given up
  }
  return { state: question.waiting, isWaiting: true };
}

/** Returns how to have it not asked, or not answered any more. */
function begin({ path, body, failed }, note) {
  const leaving = new AbortController();
  const { signal } = leaving;
  const timer = setTimeout(() => askServer(path, { body, signal })
    .then((answer) => note({ answer }))
    .catch(({ message }) => signal.aborted || note({ state: `${failed}: ${message}` })), REST);
  return () => {
    clearTimeout(timer);
    leaving.abort();
  };
}
