// What the first view shows: a run, one of its steps, one of its tokens.

import { byId } from "./dom.js";
import { explain } from "./explain.js";
import { data } from "./runner.js";
import { shortName } from "./trace.js";
import { keep } from "./url.js";

// context: the run (context.js); at: the step, by its number; cell: the value that is explained, -1 if none.
// ran: {model, prompt, amount} of that run; null if it is of ids.
// prompt: the beginning that the visitor has typed, here or in the second view.
export const state = {
    context: null,
    ran: null,
    at: 0,
    token: 0,
    cell: -1,
    head: 0,
    model: "q8",
    prompt: data.models.q8.prompt,
    temperature: 1,
    topP: 0.9,
    hasMap: false,
};

export const title = (name) => data.steps[shortName(name)]?.title ?? shortName(name);

// Spaces and line ends that can be seen.
export const visible = (text) => text.replace(/ /g, "␣").replace(/\n/g, "⏎") || "∅";

// Whether a token is no text but marks a part of a conversation, or its beginning or end.
export const isSpecial = (text) => /^<\|.*\|>$/.test(text ?? "");
export const specialNote = (text) =>
    `A token such as ${text} is no word: tokens of this kind mark the beginning, the end and the parts of a conversation.`;

// Shows how value i of the step came about.
export function explained(i) {
    state.cell = i;
    const { context, at, token } = state;
    const name = context.steps[at].replace(/moe\.(experts|weights)$/, "moe.router"); // of whose scores they come
    const box = explain(name, token, i, context);
    byId("explained")?.replaceChildren(box ?? "");
    keep(false);
}
