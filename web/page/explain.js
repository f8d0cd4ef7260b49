// How one number of a step came about, from the numbers before it in the trace and the weights in the model file.
// What is computed here is shown beside the program's own value, so that everybody sees whether the two are equal.

import { guided, h, svg } from "./dom.js";
import { inputsOf, isProduct } from "./inputs.js";
import { exp, fma, fround, full, nine, roundHalfEven, short, sumInLanes, whole } from "./numbers.js";
import { norm as length } from "./map.js";
import { agreement, figure, formula, listed, panel, sign, sourceOf } from "./parts.js";
import { product } from "./products.js";
import { layerOf, shortName } from "./trace.js";

// The explanation of value i of token t at a step, as an element. context: {trace, data, model, weights, program}.
export function explain(name, t, i, context) {
    const step = shortName(name);
    if (step === "embed") return embedding(name, t, i, context);
    if (step.startsWith("rotate")) return rotation(name, t, i, context);
    if (isProduct(name, context)) return product(name, t, i, context);
    if (step.endsWith(".q")) return codes(name, t, i, context);
    if (/norm$/.test(step)) return norm(name, t, i, context);
    if (step.endsWith("_rope")) return rope(name, t, i, context);
    if (step === "attn.scores") return score(name, t, i, context);
    if (step === "attn.probs") return share(name, t, i, context);
    if (step === "attn.mix") return mix(name, t, i, context);
    if (step.endsWith("residual")) return sum(name, t, i, context);
    if (step.endsWith("swiglu")) return swiglu(name, t, i, context);
    if (step === "moe.router") return router(name, t, i, context);
    if (step === "moe.mix") return mixExperts(name, t, i, context);
    return null;
}

// ----------------------------------------------------------------------------

function embedding(name, t, i, context) {
    const token = context.trace.tokens.values[t];
    const w = context.weights.row("embed", token);
    const [code, scale] = [w.codes[i], w.scales[Math.floor(i / w.group)]];
    const found = fround(code * scale);
    return panel(
        name,
        t,
        i,
        context,
        h(
            "p",
            {},
            guided(
                `The table has a row for token ${token}. In it stand whole numbers, [[code]]s; ${w.group} of them, a [[group]], share a [[scale]].`,
                context.data.words,
            ),
        ),
        formula(
            figure(whole(code), `code ${i} of row ${token}`, "int"),
            sign("×"),
            figure(full(scale), `scale of group ${Math.floor(i / w.group)}`, "scale"),
            sign("="),
            figure(full(found), "value"),
        ),
        h("p", { class: "check" }, agreement(found, context.trace[name].row(t)[i])),
    );
}

// A Walsh-Hadamard transform, in the order of the programs (hadamard() in runq.cpp), with signs before it, or behind it on
// the way back. Number k counts with a plus or a minus: by whether k and i have an even number of binary ones in common.
function rotation(name, t, i, context) {
    const isBack = name === "rotate_back";
    const x = context.trace[inputsOf(name, context)[0]].row(t);
    const s = context.weights.vector("rotation");
    const n = Math.round(1 / s[0] ** 2); // numbers that are mixed: each of s is + or - 1 / sqrt(n)
    const begin = Math.floor(i / n) * n;
    const signed = (k) => (isBack ? x[k] : fround(x[k] * s[k]));
    let mixed = Array.from({ length: n }, (_, k) => signed(begin + k));
    for (let h = 1; h < n; h *= 2) mixed = mixed.map((v, k) => fround(k & h ? mixed[k - h] - v : v + mixed[k + h]));
    const sum = mixed[i - begin];
    const found = isBack ? fround(sum * s[i]) : sum;
    const isEven = (bits) => (bits ? !isEven(bits & (bits - 1)) : true);
    const rows = Array.from({ length: n }, (_, k) => {
        const sign = (isEven(k & (i - begin)) ? 1 : -1) * Math.sign(s[isBack ? i : begin + k]);
        return [String(begin + k), full(x[begin + k]), sign < 0 ? "−" : "+"];
    });
    return panel(
        name,
        t,
        i,
        context,
        h(
            "p",
            {},
            `All ${n} numbers are added up, each with a plus or a minus of its own for every value, and the sum is divided by √${n}. So each number is shared among all, and the token's length stays: ${short(length(x))} before, ${short(length(context.trace[name].row(t)))} after.`,
        ),
        h(
            "details",
            {},
            h("summary", {}, `The ${n} numbers and their signs`),
            listed(rows, ["number", "before", "sign"]),
        ),
        formula(figure(full(found), "value")),
        h("p", { class: "check" }, agreement(found, context.trace[name].row(t)[i])),
    );
}

function norm(name, t, i, context) {
    const [from] = inputsOf(name, context);
    const isHead = /[qk]_norm$/.test(name);
    const weight = context.weights.vector(name);
    const n = weight.length;
    const begin = isHead ? Math.floor(i / n) * n : 0;
    const x = context.trace[from].row(t).subarray(begin, begin + n);
    const squares = sumInLanes(
        Float64Array.from(x, (v) => v * v),
        8,
    );
    const size = Math.sqrt(squares / n + context.model.eps);
    const found = fround(weight[i - begin] * (x[i - begin] * (1 / size)));
    return panel(
        name,
        t,
        i,
        context,
        h(
            "p",
            {},
            `The typical size of the ${n} numbers is the root of the mean of their squares: √(${short(squares)} / ${n} + ${short(context.model.eps)}) = ${nine(size)}.`,
        ),
        formula(
            figure(full(x[i - begin]), "number before"),
            sign("/"),
            figure(nine(size), "typical size"),
            sign("×"),
            figure(full(weight[i - begin]), "learned weight"),
            sign("="),
            figure(full(found), "value"),
        ),
        h("p", { class: "check" }, agreement(found, context.trace[name].row(t)[i])),
    );
}

function codes(name, t, i, context) {
    const from = name.slice(0, -2);
    const [x, scales, found] = [
        context.trace[from].row(t),
        context.trace[`${from}.s`].row(t),
        context.trace[name].row(t),
    ];
    const group = x.length / scales.length;
    const g = Math.floor(i / group);
    let at = g * group;
    for (let k = at; k < (g + 1) * group; k++) if (Math.abs(x[k]) > Math.abs(x[at])) at = k;
    const amax = Math.abs(x[at]);
    const inv = fround(127 / amax);
    const exact = fround(x[i] * inv);
    const code = Math.min(127, Math.max(-127, roundHalfEven(exact)));
    const back = fround(code * scales[g]);
    return panel(
        name,
        t,
        i,
        context,
        h(
            "p",
            {},
            guided(
                `Values ${g * group} to ${(g + 1) * group - 1} are a [[group]]. The largest of them (ignoring its sign) is value ${at}: ${full(x[at])}. It gets the [[code]] ${x[at] < 0 ? "−127" : "127"}, so the group's [[scale]], what one step of a code is worth, is`,
                context.data.words,
            ),
        ),
        formula(
            figure(full(amax), "largest of the group, without its sign"),
            sign("/ 127 ="),
            figure(full(scales[g]), `scale of group ${g}`, "scale"),
            fround(amax / 127) === scales[g]
                ? h("span", { class: "same" }, "✓")
                : h(
                      "span",
                      { class: "near" },
                      "the trace's scale is not this one: it was fixed beforehand, or is wrong",
                  ),
        ),
        h("p", {}, "This value in steps of the scale, rounded to a whole number:"),
        formula(
            figure(full(x[i]), "value"),
            sign("× 127 /"),
            figure(full(amax), "largest"),
            sign("="),
            figure(full(exact), "steps"),
            sign("→"),
            figure(whole(code), "code", "int"),
        ),
        h("p", { class: "check" }, agreement(code, found[i])),
        numberLine(exact, code),
        h(
            "p",
            {},
            `Back again, ${whole(code)} × ${full(scales[g])} = ${full(back)}: rounding has moved the value by ${short(Math.abs(back - x[i]))}. It can be half a step at most, ${short(scales[g] / 2)}.`,
        ),
        sourceOf("quantize", context),
    );
}

// Where a value lies between whole numbers, and to which it goes.
function numberLine(exact, code) {
    const first = Math.floor(exact) - 1;
    const x = (v) => 30 + ((v - first) / 3) * 340;
    const line = svg("svg", {
        viewBox: "0 0 400 62",
        class: "number-line",
        role: "img",
        "aria-label": `${short(exact)} lies between ${first + 1} and ${first + 2} and goes to ${code}`,
    });
    line.append(svg("line", { x1: 10, x2: 390, y1: 34, y2: 34, class: "axis" }));
    for (let v = first; v <= first + 3; v++) {
        line.append(svg("line", { x1: x(v), x2: x(v), y1: 27, y2: 41, class: v === code ? "chosen" : "axis" }));
        line.append(
            svg("text", { x: x(v), y: 57, "text-anchor": "middle", class: v === code ? "chosen" : "" }, whole(v)),
        );
    }
    line.append(svg("circle", { cx: x(exact), cy: 34, r: 5, class: "dot" }));
    // Between neighbouring points an arc would be a broken stroke.
    if (Math.abs(x(exact) - x(code)) > 12)
        line.append(svg("path", { d: `M ${x(exact)} 26 Q ${(x(exact) + x(code)) / 2} 2 ${x(code)} 22`, class: "arc" }));
    return line;
}

function rope(name, t, i, context) {
    const [from] = inputsOf(name, context);
    const width = context.trace[name].shape[2];
    const pair = i - (i % 2);
    const [a, b] = context.trace[from].row(t).subarray(pair, pair + 2);
    const [c, d] = context.trace[name].row(t).subarray(pair, pair + 2);
    const angle = Math.atan2(a * d - b * c, a * c + b * d);
    const reach = Math.max(Math.hypot(a, b), 1e-9);
    const point = (u, v) => `${60 + (u / reach) * 48},${60 - (v / reach) * 48}`;
    const picture = svg("svg", {
        viewBox: "0 0 120 120",
        class: "turn",
        role: "img",
        "aria-label": `an arrow turned by ${short(angle)} radians`,
    });
    picture.append(svg("circle", { cx: 60, cy: 60, r: 48, class: "grid" }));
    picture.append(
        svg("polyline", { points: `60,60 ${point(a, b)}`, class: "before" }),
        svg("polyline", { points: `60,60 ${point(c, d)}`, class: "after" }),
    );
    return panel(
        name,
        t,
        i,
        context,
        h(
            "p",
            {},
            `Values ${pair % width} and ${(pair % width) + 1} of the head are the tip of an arrow. At place ${t} of the text this pair is turned by ${short(angle)} radians (up to whole turns). The first pairs of a head turn fast, the last ones slowly.`,
        ),
        h(
            "div",
            { class: "turn-box" },
            picture,
            h(
                "div",
                {},
                formula(
                    figure(`(${full(a)}, ${full(b)})`, "before"),
                    sign("→"),
                    figure(`(${full(c)}, ${full(d)})`, "after"),
                ),
                h("p", {}, `Length before ${short(Math.hypot(a, b))}, after ${short(Math.hypot(c, d))}.`),
            ),
        ),
    );
}

const keyHead = (head, model) => Math.floor(head / (model.n_heads / model.n_kv_heads));

function score(name, t, i, context) {
    const { trace, model } = context;
    const n = trace[name].shape[2];
    const [head, u] = [Math.floor(i / n), i % n];
    const [queries, keys] = inputsOf(name, context);
    const d = model.head_dim;
    const g = keyHead(head, model);
    const q = trace[queries].row(t).subarray(head * d, (head + 1) * d);
    const k = trace[keys].row(u).subarray(g * d, (g + 1) * d);
    const dot = q.reduce((total, v, j) => fma(v, k[j], total), 0);
    const found = fround(dot * fround(1 / fround(Math.sqrt(d))));
    return h(
        "section",
        { class: "explain" },
        h(
            "h3",
            {},
            `How “${context.said(t)}” scores “${context.said(u)}” in head ${head}: `,
            h("span", { class: "value" }, full(trace[name].row(t)[i])),
        ),
        h(
            "p",
            {},
            `Query head ${head} of the one, times key head ${g} of the other, ${d} numbers each; the sum is divided by √${d}.`,
        ),
        formula(figure(full(dot), `sum of ${d} products`), sign(`/ √${d} =`), figure(full(found), "score")),
        h("p", { class: "check" }, agreement(found, trace[name].row(t)[i])),
        h(
            "details",
            {},
            h("summary", {}, `The ${d} products`),
            listed(
                Array.from(q, (v, j) => [String(j), full(v), full(k[j]), short(v * k[j])]),
                ["number", "query", "key", "product"],
            ),
        ),
    );
}

function share(name, t, i, context) {
    const { trace } = context;
    const n = trace[name].shape[2];
    const [head, u] = [Math.floor(i / n), i % n];
    const scores = trace[inputsOf(name, context)[0]].row(t).subarray(head * n, head * n + t + 1);
    const largest = Math.max(...scores);
    const powers = Array.from(scores, (s) => exp(fround(s - largest)));
    const total = sumInLanes(powers, 16, fround);
    const found = fround(powers[u] * fround(1 / total));
    return h(
        "section",
        { class: "explain" },
        h(
            "h3",
            {},
            `How much “${context.said(t)}” looks at “${context.said(u)}” in head ${head}: `,
            h("span", { class: "value" }, `${short(100 * found)} %`),
        ),
        h(
            "p",
            {},
            `Each score, less the largest (${nine(largest)}), is made a power of e; then each power is divided by the sum of all, ${nine(total)}.`,
        ),
        formula(
            figure(`exp(${nine(scores[u])} − ${nine(largest).replace(/^−(.*)/, "(−$1)")})`, "power of the score"),
            sign("="),
            figure(nine(powers[u]), "power"),
        ),
        formula(
            figure(nine(powers[u]), "power"),
            sign("/"),
            figure(nine(total), "sum of all powers"),
            sign("="),
            figure(full(found), "share"),
        ),
        h("p", { class: "check" }, agreement(found, trace[name].row(t)[i])),
    );
}

function mix(name, t, i, context) {
    const { trace, model } = context;
    const d = model.head_dim;
    const [head, j] = [Math.floor(i / d), i % d];
    const [shares, values] = inputsOf(name, context).map((step) => trace[step]);
    const n = shares.shape[2];
    const rows = Array.from({ length: t + 1 }, (_, u) => [
        shares.row(t)[head * n + u],
        values.row(u)[keyHead(head, model) * d + j],
    ]);
    const found = rows.reduce((sum, [p, v]) => fma(p, v, sum), 0);
    return panel(
        name,
        t,
        i,
        context,
        h(
            "p",
            {},
            `Head ${head} adds up value ${j} of every token so far, each times the share of attention that the token gets.`,
        ),
        listed(
            rows.map(([p, v], u) => [`“${context.said(u)}”`, full(p), full(v), short(p * v)]),
            ["token", "share", "value", "product"],
        ),
        formula(figure(full(found), "sum")),
        h("p", { class: "check" }, agreement(found, trace[name].row(t)[i])),
    );
}

function sum(name, t, i, context) {
    const [a, b] = inputsOf(name, context).map((step) => context.trace[step].row(t)[i]);
    const found = fround(a + b);
    return panel(
        name,
        t,
        i,
        context,
        formula(
            figure(full(a), "residual stream"),
            sign("+"),
            figure(full(b), "what the block found"),
            sign("="),
            figure(full(found), "residual stream"),
        ),
        h("p", { class: "check" }, agreement(found, context.trace[name].row(t)[i])),
    );
}

function swiglu(name, t, i, context) {
    const { trace } = context;
    const inputs = inputsOf(name, context).map((step) => trace[step].row(t));
    let [gate, up] = [inputs[0][i], inputs[1]?.[i]];
    if (inputs.length === 1) {
        const n = trace[name].shape[2];
        const begin = Math.floor(i / n) * 2 * n + (i % n);
        [gate, up] = [inputs[0][begin], inputs[0][begin + n]];
    }
    const open = fround(gate / fround(1 + exp(-gate)));
    const found = fround(open * up);
    return panel(
        name,
        t,
        i,
        context,
        h(
            "p",
            {},
            `silu(${full(gate)}) = ${full(gate)} / (1 + exp(${full(fround(-gate))})) = ${nine(open)}: the gate is ${gate > 1 ? "open" : gate > -1 ? "half open" : "nearly shut"}.`,
        ),
        formula(
            figure(nine(open), "silu(gate)"),
            sign("×"),
            figure(full(up), "up"),
            sign("="),
            figure(full(found), "value"),
        ),
        h("p", { class: "check" }, agreement(found, trace[name].row(t)[i])),
    );
}

function router(name, t, i, context) {
    const { trace, weights } = context;
    const x = trace[inputsOf(name, context)[0]].row(t);
    const w = weights.part(name, i * x.length, x.length);
    const found = fround(
        sumInLanes(
            Float64Array.from(x, (v, k) => v * w[k]),
            8,
        ),
    );
    return panel(
        name,
        t,
        i,
        context,
        h("p", {}, `Row ${i} of the router, ${x.length} weights that are not quantized, times the normalized token.`),
        h(
            "details",
            {},
            h("summary", {}, `The ${x.length} products`),
            listed(
                Array.from(x, (v, k) => [String(k), full(v), full(w[k]), short(v * w[k])]),
                ["", "token", "router", "product"],
            ),
        ),
        formula(figure(full(found), `score of expert ${i}`)),
        h("p", { class: "check" }, agreement(found, trace[name].row(t)[i])),
    );
}

function mixExperts(name, t, i, context) {
    const { trace } = context;
    const [down, weights] = inputsOf(name, context).map((step) => trace[step]);
    const experts = trace[`layers.${layerOf(name)}.moe.experts`].row(t);
    const n = down.shape[2];
    const rows = Array.from(experts, (e, k) => [e, weights.row(t)[k], down.row(t)[k * n + i]]).sort(
        (a, b) => a[0] - b[0],
    );
    const found = rows.reduce((total, [, w, v]) => fma(w, v, total), 0);
    return panel(
        name,
        t,
        i,
        context,
        listed(
            rows.map(([e, w, v]) => [`expert ${e}`, full(w), full(v), short(w * v)]),
            ["", "weight", "says", "product"],
        ),
        formula(figure(full(found), "sum")),
        h("p", { class: "check" }, agreement(found, trace[name].row(t)[i])),
    );
}
