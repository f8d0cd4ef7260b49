// The second view: the same text in two schemes, step beside step.

import { byId, h, heatMap, lineChart } from "./dom.js";
import { folding, modelChoice, promptField, statusLine, words, working } from "./choose.js";
import { contextOfRun } from "./context.js";
import { relativeError } from "./diff.js";
import { full, short, whole } from "./numbers.js";
import { data } from "./runner.js";
import { state as walk } from "./state.js";
import { layerOf, shortName } from "./trace.js";

// Schemes of one and the same model: only these can be laid side by side.
const names = Object.keys(data.models).filter((name) => data.models[name].model === data.models.q8.model);
const chosen = { a: "q8", b: names.includes("gptq") ? "gptq" : names[1] };
let state = null; // {a, b, stories, steps, at, token}

export function startCompare() {
    const { field, input: prompt } = promptField("compare-prompt");
    const button = h("button", { type: "submit", class: "primary" }, "Compare");
    const status = statusLine();
    const form = h(
        "form",
        { class: "controls" },
        field,
        button,
        h(
            "div",
            { class: "side whole" },
            modelChoice("First", "compare-a", names, chosen.a, (name) => (chosen.a = name)),
            modelChoice("Second", "compare-b", names, chosen.b, (name) => (chosen.b = name)),
        ),
    );
    const told = () => `“${walk.prompt}” · ${data.models[chosen.a].title} beside ${data.models[chosen.b].title}`;
    const intro = h(
        "p",
        { class: "intro" },
        "The same trained model, its numbers stored in two ways. Both read the same words; at each step you see how far apart they are, and where in the end they say different things.",
    );
    const controls = folding(told, intro, form);
    form.addEventListener("submit", (event) => {
        event.preventDefault();
        working(button, status, "Both programs run ...", async () => {
            const a = await contextOfRun(chosen.a, { prompt: prompt.value, newTokens: 32 });
            const own = await contextOfRun(chosen.b, { prompt: prompt.value, newTokens: 32 });
            const b = await contextOfRun(chosen.b, { ids: a.tokens, newTokens: 1 });
            const steps = a.steps.filter(
                (name) => name in b.trace && name !== "tokens" && a.trace[name].size === b.trace[name].size,
            );
            const before = state?.steps[state.at];
            state = {
                a,
                b,
                own,
                steps,
                at: Math.max(0, steps.indexOf(before ?? "layers.0.attn.q_proj")),
                token: Math.max(0, a.nPrompt - 1),
            };
            show();
            controls.fold();
        });
    });
    byId("compare").append(
        h("h2", { id: "compare-title", class: "quiet" }, "Compare two schemes"),
        controls,
        status,
        h("div", { id: "compare-view" }),
    );
    form.requestSubmit();
    // Whoever comes back with another beginning sees that one.
    addEventListener("hashchange", () => {
        if (location.hash !== "#compare" || prompt.value === walk.prompt) return;
        prompt.value = walk.prompt;
        form.requestSubmit();
    });
}

const nameOf = (context) => context.model.title;

function show() {
    const { a, own, steps } = state;
    const pick = h(
        "select",
        { id: "compare-step", "aria-label": "step", onchange: (event) => go(Number(event.target.value)) },
        steps.map((name, i) => h("option", { value: i, selected: i === state.at }, name)),
    );
    const token = h("input", {
        type: "range",
        min: "0",
        max: String(a.tokens.length - 1),
        value: String(state.token),
        "aria-label": "token",
        oninput: (event) => {
            state.token = Number(event.target.value);
            step();
        },
    });
    byId("compare-view").replaceChildren(
        h("section", { class: "card" }, h("h3", {}, "Where the words part"), stories(a, own)),
        h(
            "section",
            { class: "card" },
            h("h3", {}, "How the error grows through the layers"),
            h("div", { id: "growth" }),
        ),
        h(
            "section",
            { class: "card" },
            h("h3", {}, "One step, twice"),
            h(
                "div",
                { class: "stepper" },
                h("button", { type: "button", id: "compare-back", onclick: () => go(state.at - 1) }, "◀ Back"),
                pick,
                h("button", { type: "button", class: "primary", onclick: () => go(state.at + 1) }, "Step ▶"),
            ),
            h("label", { class: "scrubber" }, h("span", { id: "compare-token" }), token),
            h("div", { id: "compare-step-view" }),
        ),
    );
    step();
}

function go(at) {
    if (at < 0 || at >= state.steps.length) return;
    state.at = at;
    byId("compare-step").value = String(at);
    step();
}

function stories(a, own) {
    const [x, y] = [a.newIds, own.newIds];
    let same = 0;
    while (same < x.length && same < y.length && x[same] === y[same]) same++;
    const prompt = words(Array.from(a.tokens.subarray(0, a.nPrompt)), a.vocabulary).replace(/<\|[^|]*\|>/g, "");
    const story = (context, ids) =>
        h(
            "div",
            {},
            h("h4", {}, nameOf(context)),
            h(
                "p",
                { class: "story" },
                h("span", { class: "begun" }, prompt),
                h("b", {}, words(ids.slice(0, same), context.vocabulary)),
                h("span", { class: "parted" }, words(ids.slice(same), context.vocabulary)),
            ),
        );
    const said =
        same === x.length && x.length === y.length
            ? `Both write the same ${same} tokens.`
            : `After ${same} equal token${same === 1 ? "" : "s"} they part.`;
    return [h("p", {}, said), h("div", { class: "side" }, story(a, x), story(own, y))];
}

// ----------------------------------------------------------------------------

const errorAt = (name, token) =>
    token === null
        ? relativeError(state.a.trace[name].values, state.b.trace[name].values)
        : relativeError(state.a.trace[name].row(token), state.b.trace[name].row(token));

function growth() {
    const { a, steps, at } = state;
    const name = steps[at];
    const kind = shortName(name).replace(/\.q$/, "");
    const layers = a.model.n_layers;
    const stream = [
        "embed",
        ...Array.from({ length: layers }, (_, l) => [`layers.${l}.attn.residual`, `layers.${l}.ffn.residual`]).flat(),
    ].filter((step) => steps.includes(step));
    const places = [...stream, "norm", "logits"];
    const labels = places.map((step) =>
        step.endsWith("ffn.residual") ? `layer ${layerOf(step)}` : step.startsWith("layers") ? "" : step,
    );
    const series = [{ name: "residual stream", values: places.map((step) => errorAt(step, null)), class: "a" }];
    if (layerOf(name) >= 0 && !name.endsWith("residual")) {
        // The chosen step of each layer, over the place where that layer adds its result.
        const values = places.map((step) =>
            step.endsWith("ffn.residual") ? errorAt(`layers.${layerOf(step)}.${kind}`, null) : NaN,
        );
        series.push({ name: kind, values, class: "b" });
    }
    byId("growth").replaceChildren(
        h(
            "p",
            { class: "note" },
            `By how much ${nameOf(state.b)} differs from ${nameOf(a)}, by norm, over all tokens. The axis is logarithmic: each line of the grid is ten times the one below. The residual stream, ${series[1] ? `and ${kind} of each layer` : "place by place"}.`,
        ),
        lineChart(
            series,
            labels,
            `Relative error of the residual stream: ${places.map((step, i) => `${step} ${short(100 * series[0].values[i])} %`).join(", ")}`,
            Math.max(300, byId("growth").clientWidth),
        ),
    );
}

function step() {
    const { a, b, steps, at, token } = state;
    const name = steps[at];
    const isCodes = name.endsWith(".q");
    const [x, y] = [a.trace[name].row(token), b.trace[name].row(token)];
    byId("compare-token").textContent = `Token ${token} (of 0 to ${a.tokens.length - 1}): “${a.said(token)}”`;
    growth();
    const columns = x.length % 64 === 0 ? (innerWidth < 480 ? 16 : innerWidth < 720 ? 32 : 64) : x.length;
    const difference = Float32Array.from(x, (v, i) => y[i] - v);
    const most = x.reduce((size, v) => Math.max(size, Math.abs(v)), 0);
    const map = (values, label, limit) =>
        heatMap(values, {
            label,
            columns,
            most: limit,
            describe: (i) =>
                `value ${i}: ${nameOf(a)} ${isCodes ? whole(x[i]) : full(x[i])}, ${nameOf(b)} ${isCodes ? whole(y[i]) : full(y[i])}, difference ${short(difference[i])}`,
        });
    let said = `Error of this token by norm: ${short(100 * relativeError(x, y))} %.`;
    if (isCodes) {
        const differ = difference.filter((d) => d !== 0);
        const scalesOf = (context) => {
            const scales = context.trace[`${name.slice(0, -2)}.s`].row(token);
            return scales.length === 1
                ? `one scale, ${short(scales[0])}`
                : `${scales.length} scales, ${short(Math.min(...scales))} to ${short(Math.max(...scales))}`;
        };
        said = `${differ.length} of ${x.length} codes differ, by ${short(differ.length ? differ.reduce((sum, d) => sum + Math.abs(d), 0) / differ.length : 0)} on average and ${short(differ.reduce((m, d) => Math.max(m, Math.abs(d)), 0))} at most. ${nameOf(a)} has ${scalesOf(a)}; ${nameOf(b)} has ${scalesOf(b)}: a code is worth its scale, so codes may differ where values do not.`;
    }
    byId("compare-step-view").replaceChildren(
        h("p", { id: "compare-said" }, said),
        h("h4", {}, nameOf(a)),
        map(x, nameOf(a), most),
        h("h4", {}, nameOf(b)),
        map(y, nameOf(b), most),
        h(
            "h4",
            {},
            `Difference, in the same colours ${relativeError(x, y) < 0.2 && !isCodes ? "(ten times as strong)" : ""}`,
        ),
        map(difference, "difference", relativeError(x, y) < 0.2 && !isCodes ? most / 10 : most),
    );
}
