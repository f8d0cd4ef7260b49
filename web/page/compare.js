// The second view: the same text in two schemes, step beside step.

import { afterwards, byId, h, heatMap, lineChart } from "./dom.js";
import { folding, modelChoice, partedAfter, promptField, statusLine, words, working } from "./choose.js";
import { contextOfRun, sampler } from "./context.js";
import { relativeError } from "./diff.js";
import { inputsOf } from "./inputs.js";
import { mapView } from "./map.js";
import { full, short, whole } from "./numbers.js";
import { bytesInBits, data } from "./runner.js";
import { title, visible, state as walk } from "./state.js";
import { layerOf, shortName } from "./trace.js";
import { hasPlaces, keep, nameIn, numberIn, promptIn, saidWrong } from "./url.js";

// Schemes of one and the same model, with its numbers in the same places: only these can be laid side by side. And as the second one Q8 in which one matrix has
// fewer bits.
const BITS = {
    title: "Fewer bits",
    brief: "Q8, but for one matrix",
    text: "Q8 in which one matrix has codes of fewer bits. The program is the same: it reads another file.",
};
const isAlike = ({ model, tensors }) => model === data.models.q8.model && !("rotation" in tensors);
const names = Object.keys(data.models).filter((name) => isAlike(data.models[name]));
const chosen = { a: "q8", b: "gptq", matrix: "layers.1.ffn.down_proj", bits: 3 };
const usual = { ...chosen };
const isMatrix = (name) => name.startsWith("layers.") && name.endsWith(".codes");
const matrices = Object.keys(data.models[data.bits.model].tensors)
    .filter(isMatrix)
    .map((name) => name.replace(".codes", ""));
let state = null; // {a, b, own, steps, at, token, ran, map, errors, measured, grown, stream, average}
let controls = null;

export function startCompare() {
    const { field, input: prompt } = promptField("compare-prompt");
    const button = h("button", { type: "submit", class: "primary" }, "Compare");
    const status = statusLine();
    const first = modelChoice("First", "compare-a", names, chosen.a, (name) => (chosen.a = name));
    const choose = (name) => {
        chosen.b = name;
        fewer.hidden = name !== "bits";
    };
    const second = modelChoice("Second", "compare-b", [...names, "bits"], chosen.b, choose, {
        ...data.models,
        bits: BITS,
    });
    const matrix = h(
        "select",
        { id: "compare-matrix", onchange: () => run() },
        matrices.map((name) => h("option", { value: name, selected: name === chosen.matrix }, name)),
    );
    const said = h("output", {});
    const bits = h("input", {
        id: "compare-bits",
        type: "range",
        min: String(Math.min(...data.bits.all)),
        max: "8",
        oninput: () => (said.textContent = bits.value),
        onchange: () => run(),
    });
    const fewer = h(
        "div",
        { class: "fewer", hidden: true },
        h("div", { class: "field" }, h("label", { for: "compare-matrix" }, "Its matrix"), matrix),
        h("label", { class: "scrubber", for: "compare-bits" }, h("span", {}, "Bits of a weight: ", said), bits),
    );
    const form = h("form", { class: "controls" }, field, button, h("div", { class: "side whole" }, first, second));
    const titleOfSecond = () =>
        chosen.b === "bits" ? `${chosen.bits} bits of one matrix` : data.models[chosen.b].title;
    const told = () => `“${walk.prompt}” · ${data.models[chosen.a].title} beside ${titleOfSecond()}`;
    const intro = h(
        "p",
        { class: "intro" },
        "The same trained model, its numbers stored in two ways. Both read the same words; at each step you see how far apart they are, and where in the end they say different things.",
    );
    const folded = folding(told, form);
    form.addEventListener("submit", (event) => {
        event.preventDefault();
        run();
    });
    // Runs what the form says, then shows a place of it.
    const run = (of = null, wrong = [], isThere = false) =>
        working(button, status, "Both programs run ...", async (isLast) => {
            if (isThere) {
                state.token = numberIn(of, "token", 0, state.a.tokens.length - 1, state.token, wrong);
                state.at = state.steps.indexOf(nameIn(of, "step", state.steps, state.steps[state.at], wrong));
                return show();
            }
            Object.assign(chosen, { matrix: matrix.value, bits: Number(bits.value) });
            const ran = { ...chosen, prompt: prompt.value };
            const bytes = ran.b === "bits" ? await bytesInBits(ran.matrix, ran.bits) : undefined;
            const name = ran.b === "bits" ? data.bits.model : ran.b;
            const a = await contextOfRun(ran.a, { prompt: ran.prompt, newTokens: 32 });
            const own = await contextOfRun(name, { prompt: ran.prompt, newTokens: 32, bytes });
            const b = await contextOfRun(name, { ids: a.tokens, newTokens: 1, bytes });
            if (!isLast()) return;
            if (bytes) b.label = own.label = `Q8, one matrix in ${ran.bits} bits`;
            const steps = a.steps.filter(
                (name) => name in b.trace && name !== "tokens" && a.trace[name].size === b.trace[name].size,
            );
            const usualStep = ran.b === "bits" ? ran.matrix : "layers.0.attn.q_proj";
            const before = of?.size ? nameIn(of, "step", steps, usualStep, wrong) : state?.steps[state.at];
            const token = Math.max(0, a.nPrompt - 1);
            state = {
                a,
                b,
                own,
                steps,
                ran,
                at: Math.max(0, steps.indexOf(before ?? usualStep)),
                token: of ? numberIn(of, "token", 0, a.tokens.length - 1, token, wrong) : token,
            };
            show();
            folded.fold();
            keep(true);
        });
    controls = {
        run,
        status,
        prompt,
        fill() {
            first.choose(chosen.a);
            second.choose(chosen.b);
            fewer.hidden = chosen.b !== "bits";
            matrix.value = chosen.matrix;
            bits.value = said.textContent = String(chosen.bits);
            folded.say();
        },
    };
    controls.fill();
    byId("compare").append(
        h("h2", { id: "compare-title", class: "quiet" }, "Compare two schemes"),
        folded,
        status,
        intro,
        fewer,
        h("div", { id: "compare-view" }),
    );
    hasPlaces("compare", () => {
        if (!state) return {};
        const { matrix, bits, ...ran } = state.ran;
        const fewer = ran.b === "bits" ? { matrix, bits } : {};
        return { ...ran, ...fewer, token: state.token, step: state.steps[state.at] };
    });
}

// Shows what the address names. Whoever comes back with another beginning sees that one.
export async function visitCompare(of) {
    const { run, status, prompt, fill } = controls;
    if (!of.size && state?.ran.prompt === walk.prompt) return;
    const wrong = [];
    if (of.size) {
        chosen.a = nameIn(of, "a", names, usual.a, wrong);
        chosen.b = nameIn(of, "b", [...names, "bits"], usual.b, wrong);
        chosen.matrix = nameIn(of, "matrix", matrices, usual.matrix, wrong);
        chosen.bits = numberIn(of, "bits", Math.min(...data.bits.all), 8, usual.bits, wrong);
        walk.prompt = promptIn(of, data.models.q8.prompt, prompt.maxLength, wrong);
    }
    prompt.value = walk.prompt;
    fill();
    const same = state && Object.entries({ ...chosen, prompt: walk.prompt }).every(([k, v]) => state.ran[k] === v);
    await run(of, wrong, same);
    if (of.size) byId("compare-map")?.scrollIntoView({ block: "start" });
    if (wrong.length) status.failed(saidWrong(wrong));
}

const nameOf = (context) => context.label ?? context.model.title;

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
            keep(false);
        },
    });
    const { map, view } = differences();
    Object.assign(state, { map, measured: null, grown: null, stream: null, average: null });
    byId("compare-view").replaceChildren(
        h("section", { class: "card" }, h("h3", {}, "Where the words part"), stories(a, own)),
        h(
            "section",
            { class: "card", id: "compare-map" },
            h("h3", {}, "Where the difference grows"),
            view,
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
        h("section", { class: "card" }, h("h3", {}, "What comes next"), h("div", { id: "compare-next" })),
        h(
            "section",
            { class: "card" },
            h("h3", {}, "How the error grows through the layers"),
            h("div", { id: "growth" }),
        ),
    );
    step();
}

function go(at) {
    if (at < 0 || at >= state.steps.length) return;
    state.at = at;
    byId("compare-step").value = String(at);
    step();
    keep(true);
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
            : `${partedAfter(same)} ${closeCall(a, a.nPrompt - 1 + same)}`;
    return [h("p", { id: "compare-parted" }, said), h("div", { class: "side" }, story(a, x), story(own, y))];
}

// A sentence on the two most probable next tokens behind token t, if their probabilities are within 10 % of each other.
function closeCall(context, t) {
    const [first, second] = sampler(context.trace.logits.row(t), 1, 1).all;
    if (second.p < 0.9 * first.p) return "";
    const [one, other] = [first, second].map(({ id }) => `“${visible(context.vocabulary[id])}”`);
    return `${one} and ${other} were almost equally likely in ${nameOf(context)}: ${percent(first.p)} and ${percent(second.p)}.`;
}

const percent = (p) => `${(100 * p).toFixed(2)} %`;

// ----------------------------------------------------------------------------

// A step's values of a token, or of all if it is null; codes count as what they stand for.
function valuesOf(context, name, token) {
    const of = (tensor) => (token === null ? tensor.values : tensor.row(token));
    const values = of(context.trace[name]);
    if (!name.endsWith(".q")) return values;
    const scales = of(context.trace[`${name.slice(0, -2)}.s`]);
    return Float64Array.from(values, (code, i) => code * scales[Math.floor((i * scales.length) / values.length)]);
}

const errorAt = (name, token) => relativeError(valuesOf(state.a, name, token), valuesOf(state.b, name, token));

// The map in the colours of the error, and a sentence on where it grows most.
function differences() {
    const { a, steps, ran } = state;
    const shade = (name) => (state.errors.get(name) ?? 0) / state.largest;
    const map = mapView({
        context: a,
        token: state.token,
        at: a.steps.indexOf(steps[state.at]),
        title,
        shade,
        more: (name) => {
            const fewer = ran.b === "bits" && name === ran.matrix ? ` (second: ${ran.bits} bits)` : "";
            return state.errors.has(name) ? `${fewer}; error ${short(100 * state.errors.get(name))} %` : fewer;
        },
        go: (i) => go(steps.indexOf(a.steps[i])),
    });
    const view = h("div", {}, h("p", { id: "compare-grows" }), map, h("p", { class: "legend", id: "compare-legend" }));
    return { map, view };
}

// Errors of the chosen token, step by step, and the step that adds most to what its inputs bring.
function measure() {
    const { a, steps, token } = state;
    state.measured = token;
    state.errors = new Map(steps.map((name) => [name, errorAt(name, token)]));
    state.largest = Math.max(1e-9, ...[...state.errors.values()].filter(Number.isFinite));
    let most = { added: 0 };
    for (const [name, error] of state.errors) {
        const before = Math.max(0, ...inputsOf(name, a).map((input) => state.errors.get(input) ?? 0));
        if (error - before > most.added) most = { added: error - before, name, error, before };
    }
    byId("compare-grows").textContent = most.name
        ? `For this token the error grows most at ${most.name}, “${title(most.name)}”: from ${short(100 * most.before)} % in what it reads to ${short(100 * most.error)} %. Choose a step on the map to see it below.`
        : "No step of this token differs.";
    const largest = h("span", { id: "compare-largest" }, `${short(100 * state.largest)} %`);
    byId("compare-legend").replaceChildren(
        "error of this token: ",
        ...(most.name ? ["0 %", h("span", { class: "legend-bar shade" }), largest] : ["no difference"]),
    );
}

// The sum of p log(p / q) over the next tokens, in bits: how much the second's probabilities differ from the first's.
export function divergence(logits, others) {
    const logs = (x) => {
        const most = x.reduce((m, v) => Math.max(m, v), -Infinity);
        const total = Math.log(x.reduce((sum, v) => sum + Math.exp(v - most), 0));
        return Float64Array.from(x, (v) => v - most - total);
    };
    const [p, q] = [logs(logits), logs(others)];
    return p.reduce((sum, v, i) => sum + Math.exp(v) * (v - q[i]), 0) / Math.LN2;
}

// The next token's probabilities in both, and their divergence.
function next() {
    const { a, b, token } = state;
    const rows = [a, b].map((context) => context.trace.logits.row(token));
    const [x, y] = rows.map((row) => new Map(sampler(row, 1, 1).all.map(({ id, p }) => [id, p])));
    const shown = new Set([...[...x.keys()].slice(0, 5), ...[...y.keys()].slice(0, 5)]);
    const at = (t) => divergence(a.trace.logits.row(t), b.trace.logits.row(t));
    state.average ??= a.tokens.reduce((sum, _, t) => sum + at(t), 0) / a.tokens.length;
    const cell = (p) => h("td", { class: "number" }, percent(p));
    byId("compare-next").replaceChildren(
        h(
            "p",
            { id: "compare-divergence" },
            `Kullback-Leibler divergence of the second from the first: ${short(at(token))} bits behind this token, ${short(state.average)} on average over all. 0 says that both find every next word equally likely. Its bits are bits of information, not of weights.`,
        ),
        h(
            "table",
            {},
            h(
                "thead",
                {},
                h(
                    "tr",
                    {},
                    ["next token", nameOf(a), nameOf(b)].map((c) => h("th", { scope: "col" }, c)),
                ),
            ),
            h(
                "tbody",
                {},
                Array.from(shown, (id) =>
                    h("tr", {}, h("th", { scope: "row" }, visible(a.vocabulary[id])), cell(x.get(id)), cell(y.get(id))),
                ),
            ),
        ),
    );
}

function growth() {
    const { a, steps, at } = state;
    const name = steps[at];
    const kind = shortName(name).replace(/\.q$/, "");
    state.grown = name;
    const layers = a.model.n_layers;
    const stream = [
        "embed",
        ...Array.from({ length: layers }, (_, l) => [`layers.${l}.attn.residual`, `layers.${l}.ffn.residual`]).flat(),
    ].filter((step) => steps.includes(step));
    const places = [...stream, "norm", "logits"];
    const labels = places.map((step) =>
        step.endsWith("ffn.residual") ? `layer ${layerOf(step)}` : step.startsWith("layers") ? "" : step,
    );
    state.stream ??= places.map((step) => errorAt(step, null));
    const series = [{ name: "residual stream", values: state.stream, class: "a" }];
    if (layerOf(name) >= 0 && !name.endsWith("residual")) {
        // The chosen step of each layer, over the place where that layer adds its result.
        const values = places.map((step) =>
            step.endsWith("ffn.residual") ? errorAt(`layers.${layerOf(step)}.${kind}`, null) : NaN,
        );
        series.push({ name: kind, values, class: "b" });
    }
    const all = series.flatMap((s) => s.values).filter((v) => !Number.isNaN(v));
    if (all.every((v) => v === 0))
        return byId("growth").replaceChildren(
            h("p", { class: "note" }, "No difference: the residual stream is the same in both, for all tokens."),
        );
    const zero = all.includes(0) ? ", but for the lowest, which is 0" : "";
    byId("growth").replaceChildren(
        h(
            "p",
            { class: "note" },
            `By how much ${nameOf(state.b)} differs from ${nameOf(a)}, by norm, over all tokens. The axis is logarithmic: each line of the grid is ten times the one below${zero}. The residual stream, ${series[1] ? `and ${kind} of each layer` : "place by place"}.`,
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
    if (state.grown !== name) growth();
    byId("compare-token").textContent = `Token ${token} (of 0 to ${a.tokens.length - 1}): “${a.said(token)}”`;
    if (state.measured !== token) {
        measure();
        next();
    }
    afterwards(() => state.map.redraw({ token, at: a.steps.indexOf(name) }));
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
