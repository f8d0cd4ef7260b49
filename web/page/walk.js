// The first view: one run, step by step.

import { afterwards, byId, guided, h } from "./dom.js";
import { folding, modelChoice, promptField, statusLine, working } from "./choose.js";
import { contextOfRun } from "./context.js";
import { isProduct } from "./inputs.js";
import { mapView, shapeOf } from "./map.js";
import { codeLines } from "./parts.js";
import { picture } from "./pictures.js";
import { whole } from "./numbers.js";
import { data } from "./runner.js";
import { explained, isSpecial, specialNote, state, title, visible } from "./state.js";
import { layerOf, shortName } from "./trace.js";
import { hasPlaces, keep, nameIn, numberIn, promptIn, saidWrong } from "./url.js";

export const current = () => state;

const AMOUNTS = [1, 8, 16, 32, 64];
const AMOUNT = 16;
let choice = null; // of a model
let controls = null;
let run = null; // runs what the form says, then shows a place of it

export function startWalk() {
    const root = byId("walk");
    const { field, input: prompt } = promptField("prompt");
    const amount = h(
        "select",
        { id: "amount" },
        AMOUNTS.map((n) => h("option", { value: n, selected: n === AMOUNT }, String(n))),
    );
    const button = h("button", { type: "submit", class: "primary", id: "run" }, "Run");
    const status = statusLine();
    choice = modelChoice("How its numbers are stored", "walk-model", Object.keys(data.models), "q8", (name) => {
        state.model = name;
        form.requestSubmit();
    });
    const form = h(
        "form",
        { class: "controls" },
        field,
        h("div", { class: "field" }, h("label", { for: "amount" }, "New tokens"), amount),
        button,
        choice,
    );
    const told = () => `“${state.prompt}” · ${data.models[state.model].title} · ${amount.value} new tokens`;
    controls = folding(told, form);
    form.addEventListener("submit", (event) => {
        event.preventDefault();
        run();
    });
    let said = "";
    run = (of = null, wrong = [], isThere = false) =>
        working(button, status, "The program runs ...", async (isLast) => {
            if (isThere) {
                look(state.context, of, wrong);
                return said;
            }
            const before = performance.now();
            const ran = { model: state.model, prompt: prompt.value, amount: Number(amount.value) };
            const context = await contextOfRun(ran.model, { prompt: ran.prompt, newTokens: ran.amount });
            if (!isLast()) return "";
            look(context, of, wrong);
            controls.fold();
            state.ran = ran;
            keep(true);
            said = `${data.models[ran.model].program} ran for ${((performance.now() - before) / 1000).toFixed(2)} s and wrote down the ${context.steps.length} steps of each of ${context.tokens.length} tokens.`;
            return said;
        });
    root.append(
        h("h2", { id: "walk-title", class: "quiet" }, "Step through it"),
        controls,
        status,
        shortcuts(),
        h("div", { id: "run-view" }),
    );
    document.addEventListener("keydown", (event) => {
        if (root.hidden || !state.context || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey)
            return;
        if (
            event.target.closest?.(
                "input, select, textarea, canvas, pre, .map-box, .table-box, .tiles, [role=radiogroup]",
            )
        )
            return;
        if (event.key === "ArrowRight") go(state.at + 1);
        else if (event.key === "ArrowLeft") go(state.at - 1);
        else return;
        event.preventDefault();
    });
    hasPlaces("walk", place);
}

// What the address says of this view.
function place() {
    const { context, ran, at, token, cell, head, temperature, topP } = state;
    if (!context || !ran) return {};
    const isOther = (value, usual) => (value === usual ? null : value);
    return {
        model: ran.model,
        prompt: ran.prompt,
        new: isOther(ran.amount, AMOUNT),
        token,
        step: context.steps[at],
        cell: isOther(cell, -1),
        head: isOther(head, 0),
        temperature: isOther(temperature, 1),
        "top-p": isOther(topP, 0.9),
        map: state.hasMap ? 1 : null,
    };
}

// Shows what the address names: runs the program if it is another run, then goes to the step.
export async function visitWalk(of) {
    if (state.context && !of.size) return;
    const wrong = [];
    state.model = nameIn(of, "model", Object.keys(data.models), of.size ? "q8" : state.model, wrong);
    const usual = of.size ? data.models[state.model].prompt : state.prompt;
    const wanted = {
        model: state.model,
        prompt: promptIn(of, usual, byId("prompt").maxLength, wrong),
        amount: Number(nameIn(of, "new", AMOUNTS.map(String), String(AMOUNT), wrong)),
    };
    choice.choose(state.model);
    state.prompt = byId("prompt").value = wanted.prompt;
    byId("amount").value = String(wanted.amount);
    controls.say();
    const isThere = state.context !== null && Object.keys(wanted).every((key) => state.ran?.[key] === wanted[key]);
    await run(of, wrong, isThere);
    if (!state.context) return;
    if (of.has("step")) byId(state.hasMap ? "map" : "stage").scrollIntoView({ block: "start" });
    // A frame later, when heat maps have their height.
    if (of.has("tour")) requestAnimationFrame(() => requestAnimationFrame(aboveTour));
    if (wrong.length) byId("walk").querySelector(".status").failed(saidWrong(wrong));
}

// Scrolls so that the tour's panel covers nothing of an explanation that fits above it, and of a longer one not the formula.
function aboveTour() {
    for (const part of [".explain", ".formula"])
        byId("explained").querySelector(part)?.scrollIntoView({ block: "nearest" });
}

// For whoever has a minute: straight to what the page is about.
function shortcuts() {
    const to = (text, step, cell) =>
        h(
            "button",
            {
                type: "button",
                class: "pill-link",
                onclick: () => {
                    if (!state.context) return;
                    go(state.context.steps.indexOf(step), cell);
                    byId("stage").scrollIntoView({ block: "start" });
                },
            },
            text,
        );
    return h(
        "p",
        { class: "shortcuts" },
        h("span", {}, "Show me "),
        to("a group and its scale", "layers.0.attn.norm.q", 5),
        to("one product, number by number", "layers.0.attn.q_proj", 0),
        to("which words a word looks at", "layers.1.attn.probs", -1),
        to("how the next word is drawn", "logits", -1),
    );
}

// ----------------------------------------------------------------------------

// Shows a run: at the step that was shown before, and at the prompt's last token; or where the address says.
export function look(context, of = null, wrong = []) {
    const before = state.context?.steps[state.at];
    state.context = context;
    state.ran = of && state.ran;
    const last = context.tokens.length - 1;
    const usual = Math.min(Math.max(0, (context.nPrompt ?? 1) - 1), last);
    state.token = of ? numberIn(of, "token", 0, last, usual, wrong) : usual;
    const step = of?.size ? nameIn(of, "step", context.steps, "tokens", wrong) : before;
    state.at = Math.max(0, context.steps.indexOf(step));
    state.cell = -1;
    if (of?.size) {
        state.hasMap = of.get("map") === "1";
        state.head = numberIn(of, "head", 0, context.model.n_heads - 1, 0, wrong);
        state.temperature = shareIn(of, "temperature", 2, 1, wrong);
        state.topP = shareIn(of, "top-p", 1, 0.9, wrong);
        const cells = context.trace[context.steps[state.at]].perToken;
        state.cell = numberIn(of, "cell", 0, cells - 1, -1, wrong);
    }
    show();
}

// A number of the address from 0 to `most`, which a slider shows.
function shareIn(of, key, most, usual, wrong) {
    const text = of.get(key);
    const value = Number(text);
    if (text === undefined || (text !== "" && value >= 0 && value <= most)) return text === undefined ? usual : value;
    wrong.push(`${key} is “${text}”, expected 0 to ${most}`);
    return usual;
}

function show() {
    const view = byId("run-view");
    view.replaceChildren(
        tokenStrip(),
        mapOfRun(),
        h(
            "div",
            { class: "walk-grid" },
            h("nav", { class: "path", id: "path", "aria-label": "steps of the forward pass", onkeydown: pathKeys }),
            h("div", { class: "stage" }, stepper(), h("article", { id: "stage", "aria-live": "off" })),
        ),
        aboutTokens(),
    );
    showPath();
    showStage();
}

// Over the steps the map in one line, where there is room; on demand all of it.
function mapOfRun() {
    const { context, token, at } = state;
    maps = [true, false].map((isLine) => mapView({ context, token, at, title, isLine, go: (i) => go(i) }));
    const box = h(
        "details",
        { id: "map", open: state.hasMap, ontoggle: () => openMap(box.open) },
        h("summary", {}, "Map of the model"),
        h("p", { class: "note" }, MAP_NOTE),
        h(
            "p",
            { class: "map-key" },
            Object.entries(MAP_KEY).map(([kind, said]) => h("span", {}, h("i", { class: `map-${kind}` }), said)),
        ),
        maps[1],
    );
    return h("section", { class: "map", "aria-label": "map of the model" }, maps[0], box);
}

const MAP_NOTE =
    "Everything that happens to a token, each layer in a line, from left to right. A step is as wide as its numbers are many; a matrix is as high as the numbers that it takes, in the same scale. Choose a step to go there.";
const MAP_KEY = {
    matrix: "weights, whole numbers; outlined: what fewer than 8 bits save",
    codes: "whole numbers (int8)",
    fp32: "fp32",
    cache: "keys and values of the tokens so far (KV cache)",
    stream: "residual stream, as thick as it is long (its norm)",
};
let maps = [];

function openMap(isOpen) {
    if (state.hasMap === isOpen) return;
    state.hasMap = isOpen;
    keep(false);
}

export function go(at, cell = -1) {
    const n = state.context.steps.length;
    if (at < 0 || at >= n) return;
    state.at = at;
    state.cell = cell;
    showPath();
    showStage();
    keep(true);
}

export function goToken(t) {
    state.token = t;
    state.cell = -1;
    byId("token-range").value = String(t);
    markToken();
    showStage();
    keep(false);
    afterwards(() => {
        for (const map of maps) map.redraw({ token: state.token });
    });
}

// Tokens as chips, and the scrubber below.
function tokenStrip() {
    const { context } = state;
    const n = context.tokens.length;
    const next = context.newIds.at(-1);
    const chips = Array.from(context.tokens, (id, t) =>
        h(
            "button",
            {
                type: "button",
                class: `chip ${context.nPrompt !== null && t >= context.nPrompt ? "new" : "given"}`,
                tabindex: "-1", // one stop for all: markToken gives it to the chosen one
                "data-token": t,
                title: `token ${t}: id ${id}`,
                onclick: () => goToken(t),
            },
            visible(context.textOf(t)),
            h("small", {}, context.partOf(t) ? `of ${context.partOf(t)}, ${id}` : String(id)),
        ),
    );
    const range = h("input", {
        type: "range",
        id: "token-range",
        min: "0",
        max: String(n - 1),
        value: String(state.token),
        "aria-label": "token",
        oninput: (event) => goToken(Number(event.target.value)),
    });
    const box = h(
        "div",
        { class: "words" },
        h(
            "div",
            {
                class: "chips",
                id: "chips",
                onkeydown: chipKeys,
                role: "group",
                "aria-label": "tokens of the text; the chosen one is shown below. Arrow keys choose another",
            },
            chips,
            h(
                "span",
                { class: "chip next", title: `the most probable next token: id ${next}` },
                visible(context.vocabulary[next]),
                h("small", {}, "next"),
            ),
        ),
        h("label", { class: "scrubber" }, h("span", { id: "token-said", role: "status" }), range),
    );
    queueMicrotask(markToken);
    return box;
}

function aboutTokens() {
    const { context } = state;
    const special = [...context.newIds, ...context.tokens].map((id) => context.vocabulary[id]).find(isSpecial);
    return h(
        "details",
        { class: "ids" },
        h("summary", {}, "About the tokens"),
        h(
            "p",
            { class: "note" },
            "The text is cut into tokens; a word may be several of them, and a character that the vocabulary lacks is its bytes in UTF-8, such as <0xD7>. They are counted from 0, as in the program.",
            special ? ` ${specialNote(special)}` : "",
        ),
        h("p", { class: "note" }, "Ids of the new ones: ", h("output", { id: "new-ids" }, context.newIds.join(","))),
        h(
            "p",
            { class: "note" },
            "A hash of the numbers that they were drawn by, as ",
            h("code", {}, "--digest"),
            " prints it, the same on every machine (but for AWQ on a GPU): ",
            h("output", { id: "digest" }, context.digest),
        ),
    );
}

function chipKeys(event) {
    const last = state.context.tokens.length - 1;
    const to = { ArrowLeft: state.token - 1, ArrowRight: state.token + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    goToken(Math.min(last, Math.max(0, to)));
    byId("chips").querySelector("[aria-pressed=true]").focus();
}

function markToken() {
    const { context, token } = state;
    for (const chip of byId("chips").querySelectorAll("button")) {
        const isIt = Number(chip.dataset.token) === token;
        chip.setAttribute("aria-pressed", String(isIt));
        chip.tabIndex = isIt ? 0 : -1;
        if (isIt)
            requestAnimationFrame(() => {
                const box = chip.parentElement;
                box.scrollTo({ left: chip.offsetLeft - box.clientWidth / 2 });
            });
    }
    byId("token-said").textContent = `Token ${token} (of 0 to ${context.tokens.length - 1}): “${context.said(token)}”`;
}

function stepper() {
    return h(
        "div",
        { class: "stepper" },
        h("button", { type: "button", id: "back", onclick: () => go(state.at - 1) }, "◀ Back"),
        h("p", {}, h("span", { id: "step-said", role: "status" }), h("span", { class: "keys" }, " · keys ← →")),
        h("button", { type: "button", id: "step", class: "primary", onclick: () => go(state.at + 1) }, "Step ▶"),
    );
}

function pathKeys(event) {
    if (!event.target.id.startsWith("go-")) return; // the layer's slider has keys of its own
    const last = state.context.steps.length - 1;
    const to = { ArrowUp: state.at - 1, ArrowDown: state.at + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    go(to);
}

const BEHIND = ["rotate_back", "norm", "norm.q", "logits"]; // the last layer

// The way through the model: what is in front of the layers, the chosen layer, what is behind. A step of the same layer
// moves the mark alone.
function showPath() {
    const { context, at, token } = state;
    const name = context.steps[at];
    for (const map of maps) map.redraw({ at, token });
    const nav = byId("path");
    const focused = nav.contains(document.activeElement) ? document.activeElement.id : "";
    const isBehind = BEHIND.includes(name);
    const layer = Math.max(0, isBehind ? context.model.n_layers - 1 : layerOf(name));
    if (nav.dataset.layer !== String(layer)) {
        nav.dataset.layer = String(layer);
        nav.replaceChildren(...pathOf(layer));
    }
    for (const button of nav.querySelectorAll("[aria-current]")) {
        button.removeAttribute("aria-current");
        button.tabIndex = -1; // one stop for the list; arrow keys go on from there
    }
    const marked = byId(`go-${at}`);
    marked.setAttribute("aria-current", "step");
    marked.tabIndex = 0;
    if (focused.startsWith("go-")) marked.focus({ preventScroll: true });
    else if (focused) byId(focused)?.focus();
    requestAnimationFrame(() => {
        const side = nav.scrollWidth > nav.clientWidth;
        if (side) nav.scrollTo({ left: marked.offsetLeft - nav.clientWidth / 2 });
        else nav.scrollTo({ top: marked.offsetTop - nav.clientHeight / 2 });
    });
    byId("step-said").replaceChildren(
        `Step ${at + 1} of ${context.steps.length}`,
        h("span", { class: "quiet" }, `: ${title(name)}, ${name}`),
    );
    byId("back").disabled = at === 0;
    byId("step").disabled = at === context.steps.length - 1;
}

// Its steps as buttons, and the layer's slider.
function pathOf(layer) {
    const { context } = state;
    const item = (name, i) =>
        h(
            "li",
            {},
            h(
                "button",
                {
                    type: "button",
                    id: `go-${i}`,
                    tabindex: "-1",
                    class: name.endsWith(".q") ? "quantize" : isProduct(name, context) ? "product" : "",
                    onclick: () => go(i),
                },
                title(name),
                h("small", {}, shortName(name)),
            ),
        );
    const list = (test) =>
        h(
            "ol",
            {},
            context.steps.map((name, i) => (test(name) ? item(name, i) : null)),
        );
    const scrub = h("input", {
        type: "range",
        id: "layer-range",
        min: "0",
        max: String(context.model.n_layers - 1),
        value: String(layer),
        "aria-label": "layer",
        oninput: (event) => {
            const to = Number(event.target.value);
            const short = shortName(context.steps[state.at]);
            const same = context.steps.indexOf(`layers.${to}.${short}`);
            go(same >= 0 ? same : context.steps.indexOf(`layers.${to}.attn.norm`));
            byId("layer-range").focus();
        },
    });
    return [
        list((name) => layerOf(name) < 0 && !BEHIND.includes(name)),
        h(
            "label",
            { class: "scrubber layer" },
            h("span", {}, `Layer ${layer} (of 0 to ${context.model.n_layers - 1})`),
            scrub,
        ),
        h("p", { class: "part" }, "Attention"),
        list((name) => name.startsWith(`layers.${layer}.attn.`)),
        h("p", { class: "part" }, "Feed-forward"),
        list((name) => layerOf(name) === layer && !name.startsWith(`layers.${layer}.attn.`)),
        h("p", { class: "part" }, "Behind the last layer"),
        list((name) => BEHIND.includes(name)),
    ];
}

// ----------------------------------------------------------------------------
// One step

function showStage() {
    const { context, at, token } = state;
    const name = context.steps[at];
    const step = shortName(name);
    const guide = data.steps[step];
    const tensor = context.trace[name];
    const program = data.programs[context.model.program];
    const source = program.steps[step];
    const layer = layerOf(name);
    const shape = shapeOf(name, token, context);
    const stage = byId("stage");
    stage.replaceChildren(
        h(
            "header",
            { class: "step-head" },
            h(
                "p",
                { class: "where" },
                h("code", { id: "step-name" }, name),
                layer >= 0 ? ` · layer ${layer}` : "",
                ` · token ${token}, “${context.said(token)}”`,
            ),
            h("h3", { class: "step-title" }, guide?.title ?? step),
            h("p", { class: "guide" }, guide ? guided(guide.text, data.words) : ""),
        ),
        h(
            "div",
            { class: "facts" },
            guide?.equations.length
                ? h(
                      "div",
                      { class: "equation", role: "group", "aria-label": "equation", tabindex: "0" },
                      guide.equations.map((line) => h("code", {}, line)),
                  )
                : null,
            h(
                "p",
                { class: "shape" },
                h("b", {}, shape.length ? `${shape.map(whole).join(" × ")} numbers` : "one number"),
                h("small", {}, `${tensor.type}, a row for each token`),
            ),
        ),
        source
            ? h(
                  "div",
                  { class: "source" },
                  h("p", { class: "source-name" }, `${program.source}, line ${source.first + source.mark}`),
                  codeLines(source, source.lines.length > 1 ? source.mark : -1),
              )
            : "",
        picture(name),
        h("div", { id: "explained", "aria-live": "polite" }),
        h(
            "p",
            { class: "more" },
            guide && location.pathname.includes("/run/")
                ? h("a", { href: `../${guide.page.replace(".md#", ".html#")}` }, "The chapter about this step")
                : "",
        ),
    );
    if (state.cell >= 0) explained(state.cell);
}
