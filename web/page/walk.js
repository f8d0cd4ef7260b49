// The first view: one run, step by step.

import { byId, guided, h } from "./dom.js";
import { folding, modelChoice, statusLine, working } from "./choose.js";
import { contextOfRun } from "./context.js";
import { isProduct } from "./inputs.js";
import { codeLines } from "./parts.js";
import { picture } from "./pictures.js";
import { whole } from "./numbers.js";
import { data } from "./runner.js";
import { explained, isSpecial, specialNote, state, title, visible } from "./state.js";
import { layerOf, shortName } from "./trace.js";

export const current = () => state;

export function startWalk() {
    const root = byId("walk");
    const prompt = h("input", {
        id: "prompt",
        type: "text",
        value: state.prompt,
        oninput: () => (state.prompt = prompt.value),
        maxlength: "300",
        autocomplete: "off",
        spellcheck: "false",
    });
    const amount = h(
        "select",
        { id: "amount" },
        [1, 8, 16, 32, 64].map((n) => h("option", { value: n, selected: n === 16 }, String(n))),
    );
    const button = h("button", { type: "submit", class: "primary", id: "run" }, "Run");
    const status = statusLine();
    const form = h(
        "form",
        { class: "controls" },
        h("div", { class: "field grow" }, h("label", { for: "prompt" }, "A beginning"), prompt),
        h("div", { class: "field" }, h("label", { for: "amount" }, "New tokens"), amount),
        button,
        modelChoice("How its numbers are stored", "walk-model", Object.keys(data.models), "q8", (name) => {
            state.model = name;
            form.requestSubmit();
        }),
        shortcuts(),
    );
    const told = () => `“${state.prompt}” · ${data.models[state.model].title} · ${amount.value} new tokens`;
    const controls = folding(told, form);
    form.addEventListener("submit", (event) => {
        event.preventDefault();
        working(button, status, "The program runs ...", async () => {
            const before = performance.now();
            const context = await contextOfRun(state.model, { prompt: prompt.value, newTokens: Number(amount.value) });
            look(context);
            controls.fold();
            return `${data.models[state.model].program} ran for ${((performance.now() - before) / 1000).toFixed(2)} s and wrote down the ${context.steps.length} steps of each of ${context.tokens.length} tokens.`;
        });
    });
    root.append(
        h("h2", { id: "walk-title", class: "quiet" }, "Step through it"),
        controls,
        status,
        h("div", { id: "run-view" }),
    );
    document.addEventListener("keydown", (event) => {
        if (root.hidden || !state.context || event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey)
            return;
        if (event.target.closest?.("input, select, textarea, canvas, pre, .table-box, .tiles, [role=radiogroup]"))
            return;
        if (event.key === "ArrowRight") go(state.at + 1);
        else if (event.key === "ArrowLeft") go(state.at - 1);
        else return;
        event.preventDefault();
    });
    form.requestSubmit();
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

// Shows a run: at the step that was shown before, and at the prompt's last token.
export function look(context) {
    const before = state.context?.steps[state.at];
    state.context = context;
    state.token = Math.min(Math.max(0, (context.nPrompt ?? 1) - 1), context.tokens.length - 1);
    state.at = Math.max(0, context.steps.indexOf(before));
    state.cell = -1;
    show();
}

function show() {
    const view = byId("run-view");
    view.replaceChildren(
        tokenStrip(),
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

export function go(at, cell = -1) {
    const n = state.context.steps.length;
    if (at < 0 || at >= n) return;
    state.at = at;
    state.cell = cell;
    showPath();
    showStage();
}

export function goToken(t) {
    state.token = t;
    state.cell = -1;
    byId("token-range").value = String(t);
    markToken();
    showStage();
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
            h("small", {}, String(id)),
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
        h("label", { class: "scrubber" }, h("span", { id: "token-said" }), range),
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
            "The text is cut into tokens; a word may be several of them. They are counted from 0, as in the program.",
            special ? ` ${specialNote(special)}` : "",
        ),
        h("p", { class: "note" }, "Ids of the new ones: ", h("output", { id: "new-ids" }, context.newIds.join(","))),
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
        if (isIt) chip.parentElement.scrollTo({ left: chip.offsetLeft - chip.parentElement.clientWidth / 2 });
    }
    byId("token-said").textContent = `Token ${token} (of 0 to ${context.tokens.length - 1}): “${context.said(token)}”`;
}

function stepper() {
    return h(
        "div",
        { class: "stepper" },
        h("button", { type: "button", id: "back", onclick: () => go(state.at - 1) }, "◀ Back"),
        h("p", {}, h("span", { id: "step-said" }), h("span", { class: "keys" }, " · keys ← →")),
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

// The way through the model: what is in front of the layers, the chosen layer, what is behind.
function showPath() {
    const { context, at } = state;
    const nav = byId("path");
    const focused = nav.contains(document.activeElement) ? document.activeElement.id : "";
    const layer = Math.max(
        0,
        layerOf(context.steps[at]) >= 0
            ? layerOf(context.steps[at])
            : shortName(context.steps[at]).startsWith("norm") || context.steps[at] === "logits"
              ? context.model.n_layers - 1
              : 0,
    );
    const item = (name) => {
        const i = context.steps.indexOf(name);
        return h(
            "li",
            {},
            h(
                "button",
                {
                    type: "button",
                    id: `go-${i}`,
                    tabindex: i === at ? "0" : "-1", // one stop for the list; arrow keys go on from there
                    "aria-current": i === at ? "step" : null,
                    class: name.endsWith(".q") ? "quantize" : isProduct(name, context) ? "product" : "",
                    onclick: () => go(i),
                },
                title(name),
                h("small", {}, shortName(name)),
            ),
        );
    };
    const of = (test) => context.steps.filter(test).map(item);
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
    nav.replaceChildren(
        h(
            "ol",
            {},
            of((name) => ["tokens", "embed"].includes(name)),
        ),
        h(
            "label",
            { class: "scrubber layer" },
            h("span", {}, `Layer ${layer} (of 0 to ${context.model.n_layers - 1})`),
            scrub,
        ),
        h("p", { class: "part" }, "Attention"),
        h(
            "ol",
            {},
            of((name) => name.startsWith(`layers.${layer}.attn.`)),
        ),
        h("p", { class: "part" }, "Feed-forward"),
        h(
            "ol",
            {},
            of((name) => layerOf(name) === layer && !name.startsWith(`layers.${layer}.attn.`)),
        ),
        h("p", { class: "part" }, "Behind the last layer"),
        h(
            "ol",
            {},
            of((name) => ["norm", "norm.q", "logits"].includes(name)),
        ),
    );
    const marked = nav.querySelector("[aria-current]");
    if (focused.startsWith("go-")) marked?.focus({ preventScroll: true });
    else if (focused) byId(focused)?.focus();
    if (marked) {
        const side = nav.scrollWidth > nav.clientWidth;
        if (side) nav.scrollTo({ left: marked.offsetLeft - nav.clientWidth / 2 });
        else nav.scrollTo({ top: marked.offsetTop - nav.clientHeight / 2 });
    }
    byId("step-said").textContent = `Step ${at + 1} of ${context.steps.length}`;
    byId("back").disabled = at === 0;
    byId("step").disabled = at === context.steps.length - 1;
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
    const shape = tensor.shape.slice(1);
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
