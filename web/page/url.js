// The place that is shown, as the fragment of the address: a view, and behind it what that view shows.
//
//     #walk?model=q8&prompt=Once+upon+a+time&new=16&token=3&step=layers.0.attn.q_proj&cell=5
//
// A place that names nothing (#walk) leaves its view as it is; one that names something gets each view's defaults for
// the rest. A step, a run, a view is an entry in the browser's history; a token, a cell, a slider changes the last one.

const BURST = 400; // ms: changes that follow each other faster are one entry, as browsers limit their number
const places = {}; // view -> function that gives what it shows: {key: value}; null and undefined are left out
let shown = "walk";
let written = ""; // the fragment that is shown
let changed = -BURST; // when the last entry was asked for
let timer = 0;
let [arrivals, settled] = [0, 0];
let tour = null; // number of the tour's stop, as text

// {view, of}: of is a Map of what the address names, in text.
export function placeOf(hash) {
    const [view, query = ""] = hash.replace(/^#/, "").split("?", 2);
    return { view, of: new Map(new URLSearchParams(query)) };
}

// Says how a view's place is called. place(): {key: value}.
export function hasPlaces(view, place) {
    places[view] = place;
}

// The address has named a place of a view: what happens until it is shown is no change of a visitor's.
export function arrive(view, of) {
    clearTimeout(timer);
    timer = 0;
    shown = view;
    if (of.size) tour = of.get("tour") ?? null; // a tab's link leaves the tour as it is
    written = location.hash;
    return ++arrivals;
}

// It is shown, unless the address has changed again: from now on the address names all of it.
export function arrived(arrival) {
    if (arrival !== arrivals) return;
    settled = arrivals;
    write(false);
}

export function endTour() {
    tour = null;
    keep(false);
}

// The fragment of the place that a view shows.
function linkTo(view) {
    const all = { ...places[view]?.(), tour };
    const named = Object.entries(all).filter(([, value]) => value !== null && value !== undefined);
    const query = new URLSearchParams(named.map(([key, value]) => [key, String(value)])).toString();
    return query ? `#${view}?${query}` : `#${view}`;
}

// Writes what is shown into the address. asEntry: so that the browser's Back returns to what was shown before.
export function keep(asEntry) {
    if (settled !== arrivals) return;
    const now = performance.now();
    const isBurst = now - changed < BURST;
    if (asEntry) changed = now;
    if (asEntry && !isBurst) write(true);
    else timer ||= setTimeout(write, BURST, false);
}

function write(asEntry) {
    clearTimeout(timer);
    timer = 0;
    const to = linkTo(shown);
    if (to === written) return;
    written = to;
    history[asEntry ? "pushState" : "replaceState"](null, "", to);
}
addEventListener("pagehide", () => timer && write(false));

// A whole number of the address, from low to high, or `otherwise`; what is wrong with it goes to `wrong`.
export function numberIn(of, key, low, high, otherwise, wrong) {
    const text = of.get(key);
    if (text === undefined) return otherwise;
    const value = Number(text);
    if (/^\d+$/.test(text) && value >= low && value <= high) return value;
    wrong.push(`${key} is “${text}”, expected ${low} to ${high}`);
    return otherwise;
}

// The same for one of some names.
export function nameIn(of, key, names, otherwise, wrong) {
    const text = of.get(key);
    if (text === undefined) return otherwise;
    if (names.includes(text)) return text;
    wrong.push(`${key} is “${text}”${names.length < 9 ? `, expected ${names.join(", ")}` : ", which is not there"}`);
    return otherwise;
}

// The prompt, of at most `most` characters.
export function promptIn(of, otherwise, most, wrong) {
    const text = of.get("prompt") ?? otherwise;
    if (text.length > most) wrong.push(`prompt has ${text.length} characters, of which ${most} are taken`);
    return text.slice(0, most);
}

export const saidWrong = (wrong) => (wrong.length ? `The address: ${wrong.join("; ")}.` : "");
