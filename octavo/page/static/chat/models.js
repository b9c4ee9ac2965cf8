// The choice among models, in the bar and in the settings.

const STATES = { unloaded: "not loaded", loading: "loading", unloading: "being unloaded" };

/** What a model is called in a choice; where a server has several, with what it is. */
export function labelOf({ id, status }) {
  if (status?.failed) return `${id} (failed to load)`;
  const state = STATES[status?.value];
  return state === undefined ? id : `${id} (${state})`;
}

/** Whether a request has to wait for the model to be loaded. */
export function isAway(model) {
  return model?.status !== undefined && model.status.value !== "loaded";
}

/** Fill a `select` with the models; `chosen` is the id of one. */
export function fillChoice(select, models, chosen) {
  select.replaceChildren(...models.map((model) => new Option(labelOf(model), model.id)));
  select.value = chosen;
}

/** Show the models in the bar: a choice, or, where there is nothing to choose, a name. */
export function showInBar({ name, choice }, models, chosen) {
  const roots = new Set(models.map(({ id, root }) => root ?? id));
  choice.parentElement.hidden = roots.size < 2;
  name.hidden = !choice.parentElement.hidden;
  name.textContent = chosen;
  if (!choice.parentElement.hidden) fillChoice(choice, models, chosen);
}
