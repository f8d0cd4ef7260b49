// What a step's values look like: heat maps of a token's row, attention, experts, the next token.

import { sampler } from "./context.js";
import { colour, h, heatMap, inkOn } from "./dom.js";
import { inputsOf, isProduct, placeOf } from "./inputs.js";
import { full, short, whole } from "./numbers.js";
import { explained, isSpecial, specialNote, state, title, visible } from "./state.js";
import { layerOf, shortName } from "./trace.js";
import { keep } from "./url.js";

const columnsFor = (n) => {
    const width = Math.min(innerWidth, 1180);
    const most = width < 480 ? (n > 1000 ? 32 : 16) : width < 720 ? 32 : 64;
    return n % most === 0 || n > most ? most : n;
};

export function picture(name) {
    const step = shortName(name);
    if (step === "tokens") return tokensPicture();
    if (step === "attn.scores" || step === "attn.probs") return attentionPicture(name);
    if (/^moe\.(router|experts|weights)$/.test(step)) return expertsPicture(name);
    const parts = [];
    const { context, token } = state;
    if (name.endsWith(".q"))
        parts.push(
            h("h4", {}, "Before: numbers, and the largest of each group"),
            rowMap(name.slice(0, -2), false),
            h("h4", {}, "After: codes, and the scale of each group"),
            rowMap(name, true),
        );
    else if (isProduct(name, context)) {
        const [input] = inputsOf(name, context);
        parts.push(
            h("h4", {}, "Goes in: the token's codes"),
            rowMap(input, false),
            h("h4", {}, "Comes out: choose a number to see its products"),
            rowMap(name, true),
        );
    } else if (step.startsWith("rotate")) {
        const [input] = inputsOf(name, context);
        parts.push(h("h4", {}, "Before"), rowMap(input, false), h("h4", {}, "After"), rowMap(name, true));
    } else parts.push(rowMap(name, true));
    if (step === "logits") parts.unshift(nextToken(context.trace.logits.row(token)));
    parts.push(allTokens(name));
    return h("div", { class: "picture" }, parts);
}

// The row of the chosen token as a heat map: a line per group or head where they fit.
function rowMap(name, isMain) {
    const { context, token } = state;
    const tensor = context.trace[name];
    const values = tensor.row(token);
    const isCodes = name.endsWith(".q");
    const scales = isCodes ? context.trace[`${name.slice(0, -2)}.s`].row(token) : null;
    const group = scales ? values.length / scales.length : 0;
    const inner = tensor.shape.length === 3 ? tensor.shape[2] : values.length;
    let columns = columnsFor(inner < 64 && tensor.shape.length === 3 ? inner : values.length);
    if (tensor.shape.length === 3 && inner % columns) columns = Math.min(columns, inner);
    const perLine = (r) => r * columns;
    // Behind each group: its scale; before it is quantized, its largest value.
    let noteOf = null;
    let labelOf = (r) => (perLine(r) % 64 === 0 ? String(perLine(r)) : "");
    if (isCodes || (!isMain && `${name}.s` in context.trace)) {
        const size = group || values.length / context.trace[`${name}.s`].row(token).length;
        const largest = (g) =>
            values.subarray(g * size, (g + 1) * size).reduce((most, x) => Math.max(most, Math.abs(x)), 0);
        const note = isCodes ? (g) => `scale ${short(scales[g])}` : (g) => `largest ${short(largest(g))}`;
        noteOf = (r) => (perLine(r) % size ? "" : note(perLine(r) / size));
        labelOf = (r) => (perLine(r) % size ? "" : `group ${perLine(r) / size}`);
    } else if (tensor.shape.length === 3 && inner % columns === 0) {
        const chosen = shortName(name).startsWith("moe.")
            ? context.trace[`layers.${layerOf(name)}.moe.experts`].row(token)
            : null;
        labelOf = (r) =>
            perLine(r) % inner ? "" : chosen ? `expert ${chosen[perLine(r) / inner]}` : `head ${perLine(r) / inner}`;
    }
    const describe = (i) => {
        const where = placeOf(name, i, context);
        if (!isCodes) return `${where}: ${tensor.isWhole ? whole(values[i]) : full(values[i])}`;
        const g = Math.floor(i / group);
        return `${where}, group ${g}: code ${whole(values[i])} × scale ${short(scales[g])} = ${short(values[i] * scales[g])}`;
    };
    return heatMap(values, {
        label: `${title(name)}, ${shortName(name)}`,
        columns,
        rowLabel: labelOf,
        rowNote: noteOf,
        describe,
        hint: isMain ? "Point at a number, or move with the arrow keys; a click or Enter shows how it came about." : "",
        choose: isMain && name !== "tokens" ? explained : null,
        selected: isMain ? state.cell : -1,
    });
}

// Every token's row, as thin lines.
function allTokens(name) {
    const { context } = state;
    const tensor = context.trace[name];
    if (tensor.perToken > 400) return null;
    const box = h("details", { class: "all" }, h("summary", {}, "All tokens at this step, a line for each"));
    box.addEventListener("toggle", () => {
        if (!box.open || box.children.length > 1) return;
        box.append(
            heatMap(tensor.values, {
                label: `${title(name)}, all tokens`,
                columns: tensor.perToken,
                rowLabel: (t) => visible(context.textOf(t)),
                describe: (i) =>
                    `“${context.said(Math.floor(i / tensor.perToken))}”, value ${i % tensor.perToken}: ${short(tensor.values[i])}`,
            }),
        );
    });
    return box;
}

function tokensPicture() {
    const { context } = state;
    return h(
        "div",
        { class: "picture" },
        h("p", {}, `The vocabulary of this small model has ${whole(context.vocabulary.length)} tokens. The text is:`),
        h(
            "ul",
            { class: "token-list" },
            Array.from(context.tokens, (id, t) =>
                h(
                    "li",
                    {},
                    h("b", {}, visible(context.textOf(t))),
                    " ",
                    h("small", {}, context.partOf(t) ? `of ${context.partOf(t)}, ${id}` : String(id)),
                ),
            ),
        ),
    );
}

function attentionPicture(name) {
    const { context, token } = state;
    const tensor = context.trace[name];
    const [, heads, n] = tensor.shape;
    const isShare = name.endsWith("probs");
    const shares = context.trace[name.replace(/scores$/, "probs")];
    const row = tensor.row(token);
    const values = Float32Array.from(
        { length: heads * (token + 1) },
        (_, i) => row[Math.floor(i / (token + 1)) * n + (i % (token + 1))],
    );
    const text = h("p", { class: "attended" });
    const say = (head) => {
        state.head = head;
        keep(false);
        text.replaceChildren(
            h("small", {}, `Head ${head} of “${context.said(token)}” looks at: `),
            ...Array.from({ length: token + 1 }).flatMap((_, u) => {
                const share = shares.row(token)[head * n + u];
                const text = context.partOf(u) ? `${context.textOf(u)}(${context.partOf(u)})` : context.textOf(u);
                const mark = h("mark", { title: `${short(100 * share)} %` }, visible(text));
                mark.style.background = colour(share);
                mark.style.color = inkOn(share);
                return [mark, h("wbr")];
            }),
        );
        for (const button of pick.querySelectorAll("button"))
            button.setAttribute("aria-pressed", String(Number(button.dataset.head) === head));
    };
    const pick = h(
        "div",
        { class: "heads", role: "group", "aria-label": "head" },
        Array.from({ length: heads }, (_, head) => {
            const button = h(
                "button",
                { type: "button", "data-head": head, onclick: () => say(head) },
                h("span", {}, `Head ${head}`),
            );
            button.append(triangle(tensor, head));
            return button;
        }),
    );
    const map = heatMap(values, {
        label: `${isShare ? "shares" : "scores"} of token ${token}, a line for each head`,
        columns: token + 1,
        square: true,
        from: isShare ? 0 : undefined,
        rowLabel: (head) => `head ${head}`,
        describe: (i) =>
            `head ${Math.floor(i / (token + 1))}, “${context.said(i % (token + 1))}”: ${isShare ? `${short(100 * values[i])} %` : short(values[i])}`,
        hint: "A line for each head, a column for each token so far. Choose a cell to see how it came about.",
        choose: (i) => {
            const head = Math.floor(i / (token + 1));
            say(head);
            explained(head * n + (i % (token + 1)));
        },
    });
    say(Math.min(state.head, heads - 1));
    return h(
        "div",
        { class: "picture" },
        text,
        map,
        h("h4", {}, "All tokens: each line is a token, each column one that it may look at"),
        pick,
    );
}

// A head's whole matrix as a small canvas.
function triangle(tensor, head) {
    const [tokens, heads, n] = tensor.shape;
    const values = new Float32Array(tokens * n);
    for (let t = 0; t < tokens; t++)
        values.set(tensor.values.subarray((t * heads + head) * n, (t * heads + head + 1) * n), t * n);
    const map = heatMap(values, {
        label: `head ${head}`,
        columns: n,
        square: true,
        hidden: (i) => i % n > Math.floor(i / n),
        describe: () => "",
    });
    map.classList.add("small");
    map.canvas.removeAttribute("tabindex");
    return map;
}

function expertsPicture(name) {
    const { context, token } = state;
    const layer = layerOf(name);
    const scores = context.trace[`layers.${layer}.moe.router`].row(token);
    const chosen = Array.from(context.trace[`layers.${layer}.moe.experts`].row(token));
    const weights = context.trace[`layers.${layer}.moe.weights`].row(token);
    const most = Math.max(...scores.map(Math.abs));
    const bars = Array.from(scores, (score, e) => {
        const k = chosen.indexOf(e);
        const bar = h("span", { class: "bar" });
        bar.style.setProperty("--size", `${(50 * Math.abs(score)) / most}%`);
        bar.classList.toggle("below", score < 0);
        return h(
            "li",
            { class: k >= 0 ? "chosen" : "" },
            h("button", { type: "button", onclick: () => explained(e) }, `expert ${e}`),
            h("span", { class: "bar-box" }, bar),
            h("span", { class: "number" }, short(score)),
            h("span", { class: "weight" }, k >= 0 ? `chosen, weight ${short(weights[k])}` : ""),
        );
    });
    return h(
        "div",
        { class: "picture" },
        h(
            "p",
            {},
            `“${context.said(token)}” goes to experts ${chosen.join(" and ")}. Choose an expert to see its score's sum.`,
        ),
        h("ol", { class: "bars experts" }, bars),
        routes(layer),
    );
}

// Which experts each token of the text goes to.
function routes(layer) {
    const { context } = state;
    const experts = context.trace[`layers.${layer}.moe.experts`];
    return h(
        "details",
        {},
        h("summary", {}, "Where all tokens go"),
        h(
            "ul",
            { class: "token-list" },
            Array.from(context.tokens, (_, t) =>
                h(
                    "li",
                    {},
                    h("b", {}, visible(context.textOf(t))),
                    " ",
                    h("small", {}, Array.from(experts.row(t)).join(", ")),
                ),
            ),
        ),
    );
}

const percent = (p) => (p >= 0.00005 || p === 0 ? `${(100 * p).toFixed(2)} %` : "< 0.01 %");

// Probabilities of the next token, with the sampler's two settings.
function nextToken(logits) {
    const { context } = state;
    const list = h("ol", { class: "bars next-tokens", id: "next-tokens" });
    const said = h("p", { class: "note" });
    const special = h("p", { class: "note" });
    const slider = (id, label, max, step, value, set) => {
        const output = h("output", {}, short(value));
        return h(
            "label",
            { class: "scrubber", for: id },
            h("span", {}, `${label}: `, output),
            h("input", {
                id,
                type: "range",
                min: "0",
                max,
                step,
                value: String(value),
                oninput: (event) => {
                    set(Number(event.target.value));
                    keep(false);
                    output.textContent = short(Number(event.target.value));
                    draw();
                },
            }),
        );
    };
    function draw() {
        const { all } = sampler(logits, state.temperature, state.topP);
        const kept = all.filter((x) => x.kept);
        const shown = all.slice(0, 12);
        list.replaceChildren(
            h(
                "li",
                { class: "titles" },
                h("span", {}, "token"),
                h("span", {}),
                h("span", { class: "number" }, "share of all"),
                h("span", { class: "weight" }, "share when drawn"),
            ),
            ...shown.map(({ id, p, kept: isKept, share }) => {
                const bar = h("span", { class: "bar" });
                bar.style.setProperty("--size", `${100 * p}%`);
                return h(
                    "li",
                    { class: isKept ? "chosen" : "", "data-id": id },
                    h(
                        "b",
                        { class: isSpecial(context.vocabulary[id]) ? "special" : "" },
                        visible(context.vocabulary[id]),
                    ),
                    h("span", { class: "bar-box full" }, bar),
                    h("span", { class: "number" }, `${percent(p)}`),
                    h("span", { class: "weight" }, isKept ? `drawn ${percent(share)}` : "left out"),
                );
            }),
        );
        said.textContent =
            state.temperature === 0
                ? "Temperature 0: always the most probable token."
                : `${kept.length} of ${all.length} tokens may be drawn.`;
        const label = shown.map(({ id }) => context.vocabulary[id]).find(isSpecial);
        special.textContent = label ? specialNote(label) : "";
    }
    draw();
    return h(
        "section",
        { class: "next-token" },
        h("h4", {}, "The next token"),
        h(
            "p",
            {},
            "A high temperature makes unlikely tokens likelier; top-p leaves out those behind the most probable ones that together reach it.",
        ),
        h(
            "div",
            { class: "sliders" },
            slider("temperature", "Temperature", "2", "0.05", state.temperature, (v) => (state.temperature = v)),
            slider("top-p", "Top-p", "1", "0.01", state.topP, (v) => (state.topP = v)),
        ),
        said,
        list,
        special,
    );
}
