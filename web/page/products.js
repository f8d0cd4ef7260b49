// Products of codes: 64 whole numbers times 64 others, their exact sum, two scales.

import { colour, guided, h, inkOn } from "./dom.js";
import { fma, fround, full, short, whole } from "./numbers.js";
import { agreement, figure, formula, panel, sign, sourceOf } from "./parts.js";
import { layerOf, shortName } from "./trace.js";

// What a product multiplies: {x, scales, matrix, row, expert}.
function factors(name, t, i, context) {
    const { trace, model, data } = context;
    const step = shortName(name);
    if (step === "logits")
        return {
            x: trace["norm.q"].row(t),
            scales: trace["norm.s"].row(t),
            matrix: model.classifier,
            row: i,
            expert: 0,
        };
    const place = `layers.${layerOf(name)}.${data.contract.inputs[step]}`;
    const [codesOf, scalesOf] = [trace[`${place}.q`], trace[`${place}.s`]];
    if (!step.startsWith("moe."))
        return { x: codesOf.row(t), scales: scalesOf.row(t), matrix: name, row: i, expert: 0 };
    const width = trace[name].shape[2];
    const choice = Math.floor(i / width);
    const expert = trace[`layers.${layerOf(name)}.moe.experts`].row(t)[choice];
    if (codesOf.shape.length === 2)
        return { x: codesOf.row(t), scales: scalesOf.row(t), matrix: name, row: i % width, expert };
    const [n, m] = [codesOf.shape[2], scalesOf.shape[2]];
    return {
        x: codesOf.row(t).subarray(choice * n, (choice + 1) * n),
        scales: scalesOf.row(t).subarray(choice * m, (choice + 1) * m),
        matrix: name,
        row: i % width,
        expert,
    };
}

// The groups of a product: {sum, wScale, xScale, both, before, total}; both: the product of the scales, rounded to fp32;
// before, total: the running sum without and with this group, in the programs' order (docs/numerics.md, "The order in
// runq"). fused: sum * both + before is rounded once (fma), otherwise after each of the two operations.
export function groupsOf(x, scales, w, fused) {
    const group = x.length / scales.length;
    let total = 0;
    return Array.from(scales, (xScale, g) => {
        let sum = 0;
        for (let k = g * group; k < (g + 1) * group; k++) sum += x[k] * w.codes[k];
        const wScale = w.scales[w.scales.length === scales.length ? g : 0];
        const both = fround(wScale * xScale);
        const before = total;
        total = fused ? fma(fround(sum), both, total) : fround(total + fround(fround(sum) * both));
        return {
            sum,
            wScale,
            xScale,
            both,
            before,
            total,
            begin: g * group,
            end: (g + 1) * group,
        };
    });
}

// What the page shows of value i of token t: for tests, too.
export function productOf(name, t, i, context) {
    const { x, scales, matrix, row, expert } = factors(name, t, i, context);
    const w = context.weights.row(matrix, row, expert);
    const value = context.trace[name].row(t)[i];
    let groups = groupsOf(x, scales, w, true);
    let fused = true;
    if (groups.at(-1).total !== value) {
        const other = groupsOf(x, scales, w, false);
        if (other.at(-1).total === value) [groups, fused] = [other, false];
    }
    return { x, w, groups, fused, matrix, row, expert, value };
}

export function product(name, t, i, context) {
    const { x, w, groups, fused, matrix, row, expert, value } = productOf(name, t, i, context);
    const n = x.length;
    const size = n / groups.length;
    const recorded = context.trace[`${name}.acc`];
    const perGroup = groups.length;
    const words = context.data.words;
    const isExpert = shortName(name).startsWith("moe.");
    const first =
        groups.length === 1 ? `All ${n} products make one [[group]] here.` : `${size} products make a [[group]].`;
    const where = isExpert ? `Row ${row} of expert ${expert}'s matrix` : `Row ${row} of ${matrix.split(".").at(-1)}`;
    const sections = groups.map((g, at) => {
        const acc = recorded ? recorded.row(t)[i * perGroup + at] : null;
        const body = () => [
            adder(x, w, g),
            formula(
                figure(full(g.wScale), "scale of the weights", "scale"),
                sign("×"),
                figure(full(g.xScale), "scale of the token", "scale"),
                sign("="),
                figure(full(g.both), "both scales in one, rounded", "scale"),
            ),
            formula(
                figure(whole(g.sum), "exact sum of the products", "int"),
                sign("×"),
                figure(full(g.both), "both scales", "scale"),
                at > 0 ? [sign("+"), figure(full(g.before), `sum after group ${at - 1}`)] : null,
                sign("="),
                figure(full(g.total), groups.length === 1 ? "a number again" : `sum after group ${at}`),
            ),
            acc === null
                ? null
                : h(
                      "p",
                      { class: "check" },
                      acc === g.sum
                          ? h("span", { class: "same" }, `The trace has this sum as well: ${whole(acc)} ✓`)
                          : h("span", { class: "apart" }, `The trace has ${whole(acc)}.`),
                  ),
        ];
        const title =
            groups.length === 1
                ? `${n} codes of the token times ${n} codes of the weights`
                : `Group ${at}: ${size} codes of the token times ${size} codes of the weights`;
        if (at < 2) return h("section", { class: "group" }, h("h4", {}, title), body());
        const summary = h("summary", {}, `${title}: ${whole(g.sum)}; the sum after it is ${full(g.total)}`);
        const box = h("details", { class: "group" }, summary);
        box.addEventListener("toggle", () => box.append(...body().flat().filter(Boolean)), { once: true });
        return box;
    });
    const sums =
        groups.length === 1
            ? figure(full(groups[0].total), "one group: this is the result")
            : groups.map((g, at) => [at ? sign("→") : null, figure(full(g.total), `after group ${at}`)]);
    const rounded = fused
        ? "multiplied and added in one step, rounded once (a fused multiply-add)"
        : "multiplied, rounded, added, and rounded again";
    const total = groups.at(-1).total;
    return panel(
        name,
        t,
        i,
        context,
        h(
            "p",
            {},
            guided(
                `${where} is ${n} whole numbers, [[code]]s, and so is the token. They are multiplied pair by pair and added up, all in whole numbers, so nothing is lost. ${first} Its sum, times the product of the two [[scale]]s, is a number again.`,
                words,
            ),
        ),
        stored(w, row),
        sections,
        h(
            "div",
            { class: "total" },
            groups.length > 1
                ? h(
                      "p",
                      { class: "rounding" },
                      `Group after group, its sum of products times both scales is added to the sum so far: ${rounded}. ${fused ? "So a group has two roundings: of the scales' product, and this one." : ""}`,
                  )
                : null,
            formula(sums),
            h("p", { class: "check" }, agreement(total, value)),
        ),
        sourceOf("dot", context),
    );
}

// GPTQ: what lies in the file.
function stored(w, row) {
    if (!w.stored) return null;
    const { bits, zeros, times, group, codes: raw } = w.stored;
    const zero = zeros[0];
    const text =
        times === 1
            ? `In the file a weight of row ${row} has ${bits} bits, a code from 0 to ${2 ** bits - 1}, and ${group} of them share a zero point, here ${zero}: the first weight is ${raw[0]} − ${zero} = ${short(w.codes[0])}.`
            : `In the file a weight of row ${row} has ${bits} bits, a code from 0 to ${2 ** bits - 1}. Zero points lie at fifths of a code: the first weight is 5 × ${raw[0]} − ${zero} = ${short(w.codes[0])}.`;
    return h("p", { class: "stored" }, text);
}

// The products of a group as tiles, and a slider that adds them up one by one.
function adder(x, w, g) {
    const n = g.end - g.begin;
    const products = Array.from({ length: n }, (_, k) => x[g.begin + k] * w.codes[g.begin + k]);
    const most = Math.max(1, ...products.map(Math.abs));
    const tiles = products.map((p, k) => {
        const tile = h(
            "li",
            {
                class: "tile",
                title: `value ${g.begin + k}: ${whole(x[g.begin + k])} × ${whole(w.codes[g.begin + k])} = ${whole(p)}`,
            },
            `${whole(x[g.begin + k])} × ${whole(w.codes[g.begin + k])}`,
            h("b", {}, whole(p)),
        );
        tile.style.background = colour(p / most);
        tile.style.color = inkOn(p / most);
        return tile;
    });
    const said = h("output", { class: "running" });
    const slider = h("input", {
        type: "range",
        min: "0",
        max: String(n),
        value: String(n),
        "aria-label": "how many products are added up",
    });
    const show = () => {
        const m = Number(slider.value);
        tiles.forEach((tile, k) => tile.classList.toggle("later", k >= m));
        said.textContent = `${m} products added: ${whole(products.slice(0, m).reduce((a, b) => a + b, 0))}`;
    };
    slider.addEventListener("input", show);
    show();
    return [
        h("p", { class: "tile-key" }, "token's code × weight's code, and their product"),
        h("ol", { class: "tiles", tabindex: "0", "aria-label": `${n} products` }, tiles),
        h("label", { class: "adder" }, slider, said),
    ];
}
