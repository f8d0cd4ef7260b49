// The map: all steps of a run at once. Every number of a token is as wide as every other, and a matrix has its rows and
// columns in the same scale, so that sizes can be compared by eye. All of it is drawn from a trace and its model.

import { h, svg } from "./dom.js";
import { inputsOf, isProduct } from "./inputs.js";
import { short, whole } from "./numbers.js";
import { layerOf, shortName } from "./trace.js";

const GAP = 3; // pixels between two steps
const THIN = 3; // the least width of a step
const STRIP = 9; // height of a step's result
const EDGE = 3; // in front of the first step
const PART = 12; // and behind a layer
const NAMES = 66; // height of the steps' names
const LENGTH = 34; // width of the stream's length, in digits
const STREAM = 14; // height of the residual stream where it is longest

// Dimensions of a step's values of token t: of scores and shares those of the positions up to its own.
export function shapeOf(name, t, { trace }) {
    const [, ...shape] = trace[name].shape;
    return isShared(shortName(name)) ? [shape[0], t + 1] : shape;
}

// What a step is made of, for token t: {values, isCodes, matrix, cache}; matrix: {rows, columns, bits} of the weights
// that it reads, cache: {rows, columns} of the keys or values.
export function sizesOf(name, t, context) {
    const { trace, model } = context;
    const step = shortName(name);
    const values = shapeOf(name, t, context).reduce((n, m) => n * m, 1);
    const sizes = { values, isCodes: trace[name].isWhole, matrix: null, cache: null };
    if (isProduct(name, context)) {
        const columns = trace[inputsOf(name, context)[0]].shape.at(-1);
        const kind = step === "logits" ? model.classifier : step.split(".").at(-1);
        sizes.matrix = { rows: values, columns, bits: model.layout.formats?.[kind].bits ?? 8 };
    }
    if (step === "attn.scores" || step === "attn.mix") {
        const source = trace[`layers.${layerOf(name)}.${step === "attn.mix" ? "attn.v_proj" : "attn.k_rope"}`];
        sizes.cache = { rows: t + 1, columns: source.perToken };
    }
    return sizes;
}

export function norm(row) {
    return Math.sqrt(row.reduce((sum, x) => sum + x * x, 0));
}

const isStream = (name) => /^(embed|rotate|rotate_back)$|residual$/.test(name);
const isShared = (step) => step === "attn.scores" || step === "attn.probs"; // a part of their rows is in use

// All steps in order, in parts: in front of the layers (-1), each layer, behind them (n_layers).
function partsOf({ steps, model }) {
    const parts = [];
    const firstInLayer = steps.findIndex((name) => layerOf(name) === 0);
    steps.forEach((name, at) => {
        const layer = layerOf(name) >= 0 ? layerOf(name) : at < firstInLayer ? -1 : model.n_layers;
        if (parts.at(-1)?.layer !== layer) parts.push({ layer, steps: [] });
        parts.at(-1).steps.push({ name, at });
    });
    return parts;
}

// What is said of a step, as text.
export function saidOf(name, t, context, title) {
    const { values, isCodes, matrix, cache } = sizesOf(name, t, context);
    const parts = [`${whole(values)} ${isCodes ? "whole" : "fp32"} number${values === 1 ? "" : "s"}`];
    if (matrix) {
        const { rows, columns, bits } = matrix;
        const size = short((rows * columns * bits) / 8 / 1024);
        parts.push(`a matrix of ${whole(rows)} × ${whole(columns)} codes of ${bits} bits: ${size} KiB`);
    }
    if (cache) parts.push(`reads ${cache.rows} × ${cache.columns} numbers of the KV cache`);
    if (isStream(name)) parts.push(`length of the residual stream ${short(norm(context.trace[name].row(t)))}`);
    return `${title(name)} (${name}): ${parts.join("; ")}`;
}

// A drawing of the map. options: context; token; title(name); isLine: all in one line,
// without names; width: in pixels; shade(name): from 0 to 1, instead of the colours of what is stored; said(name).
function draw({ context, token, isLine, width, title, shade, said }) {
    const parts = partsOf(context);
    const rows = isLine ? [parts] : parts.map((part) => [part]);
    const sizes = new Map(context.steps.map((name) => [name, sizesOf(name, token, context)]));
    const columns = ({ name }) => Math.max(sizes.get(name).values, sizes.get(name).cache?.columns ?? 0);
    const most = Math.max(...rows.map((row) => row.flatMap((part) => part.steps.map(columns)).reduce((a, b) => a + b)));
    const gaps = Math.max(...rows.map((row) => row.reduce((n, part) => n + part.steps.length * (GAP + 1) + PART, 0)));
    const hasNames = !isLine && width > 700;
    const scale = Math.min(0.21, (width - gaps - EDGE - (hasNames ? LENGTH : 0)) / most); // pixels for a number
    const norms = new Map(context.steps.filter(isStream).map((name) => [name, norm(context.trace[name].row(token))]));
    const longest = Math.max(...norms.values());
    const drawing = svg("svg", { class: "map-drawing" });
    const add = (to, tag, attributes, ...children) => to.append(svg(tag, attributes, ...children));
    let y = 0; // of the row
    let length = 0; // of the residual stream
    for (const row of rows) {
        const tall = ({ name }) => Math.max(sizes.get(name).matrix?.columns ?? 0, sizes.get(name).cache?.rows ?? 0);
        const top = y + 15 + (hasNames && row[0].layer === 0 ? NAMES : 0);
        const base = top + scale * Math.max(...row.flatMap((part) => part.steps.map(tall))); // where matrices end
        let x = EDGE;
        let flows = x; // from where the stream is to be drawn
        const stream = (to) => {
            const height = (STREAM * length) / longest;
            const place = {
                x: flows,
                y: base + STRIP + 3,
                width: Math.max(0, to - flows),
                height,
                class: "map-stream",
            };
            if (length) add(drawing, "rect", place);
            flows = to;
        };
        for (const { layer, steps } of row) {
            if (layer >= 0 && layer < context.model.n_layers)
                add(drawing, "text", { x, y: y + 10, class: "map-layer" }, `Layer ${layer}`);
            let lastName = -99;
            for (const { name, at: i } of steps) {
                const { values, isCodes, matrix, cache } = sizes.get(name);
                const w = Math.max(THIN, scale * columns({ name }));
                const group = svg("g", { class: "map-step", "data-at": i }, svg("title", {}, said(name)));
                const share = shade?.(name);
                const box = (kind, rows, bottom, width = w) => {
                    const place = { x, y: bottom - rows, width, height: rows, class: shade ? "map-shaded" : kind };
                    add(group, "rect", place);
                    if (shade) group.lastChild.style.setProperty("--share", `${Math.round(100 * Math.min(1, share))}%`);
                };
                const hit = { x, y: top - 2, width: w + GAP, height: base - top + STRIP + STREAM, class: "map-hit" };
                add(group, "rect", hit);
                if (matrix) {
                    const height = scale * matrix.columns;
                    if (matrix.bits < 8)
                        add(group, "rect", { x, y: base - height, width: w, height, class: "map-saved" });
                    box("map-matrix", (height * matrix.bits) / 8, base - 1);
                }
                if (cache) box("map-cache", Math.max(1, scale * cache.rows), base - 1, scale * cache.columns);
                box(isCodes ? "map-codes" : "map-fp32", STRIP, base + STRIP, Math.max(THIN, scale * values));
                if (hasNames && layer === 0) {
                    lastName = Math.max(x + w / 2, lastName + 13);
                    const turn = `translate(${lastName.toFixed(1)} ${top - 5}) rotate(-48)`;
                    add(drawing, "text", { transform: turn, class: "map-name" }, title(name));
                }
                if (isStream(name)) {
                    stream(x);
                    length = norms.get(name);
                }
                drawing.append(group);
                x += w + GAP;
            }
            x += PART;
        }
        stream(x - PART);
        if (hasNames && norms.has(row[0].steps.at(-1).name))
            add(drawing, "text", { x, y: base + STRIP + 14, class: "map-length" }, short(length));
        y = base + STRIP + STREAM + 8;
    }
    for (const [name, value] of Object.entries({ width, height: y, viewBox: `0 0 ${width} ${y}` }))
        drawing.setAttribute(name, value);
    return drawing;
}

// The map as an element that takes the keyboard: arrows go to the next step and to the next layer. options as for
// draw(), but for width and said; at: number of the chosen step; go(at); more(name): what is said of a step besides.
// redraw({token, at}) shows another place.
export function mapView(options) {
    const { context, title, go, more = () => "" } = options;
    let { token, at } = options;
    const said = (name) => `${saidOf(name, token, context, title)}${more(name)}`;
    const box = h("div", { class: "map-box", tabindex: "0", role: "application", "aria-roledescription": "map" });
    const readout = h("p", { class: "readout", "aria-live": "polite" });
    const view = h("div", { class: "map-view" }, box, readout);
    let drawn = null; // the token whose map there is
    let width = 0; // of the box; none while it is hidden
    // Outlines the chosen step.
    const mark = () => {
        box.querySelector(".map-frame")?.remove();
        const step = box.querySelector(`[data-at="${at}"]`);
        const hit = step.querySelector(".map-hit");
        const [x, y, w, height] = ["x", "y", "width", "height"].map((name) => Number(hit.getAttribute(name)));
        const frame = { x: x - 2, y: y - 1, width: w - GAP + 4, height: height - STREAM + 5, rx: 3 };
        step.append(svg("rect", { ...frame, class: "map-frame" }));
    };
    const stepAt = (event) => event.target.closest?.(".map-step")?.dataset.at;
    const say = (i) => (readout.textContent = said(context.steps[i]));
    view.redraw = (place = {}) => {
        token = place.token ?? token;
        at = place.at ?? at;
        if (!width) return;
        if (drawn !== token) box.replaceChildren(draw({ ...options, token, said, width }));
        drawn = token;
        mark();
        box.setAttribute(
            "aria-label",
            `Map of the model, at ${said(context.steps[at])}. Arrow keys go to other steps.`,
        );
        say(at);
    };
    box.addEventListener("pointerover", (event) => say(stepAt(event) ?? at));
    box.addEventListener("pointerleave", () => say(at));
    box.addEventListener("click", (event) => stepAt(event) && go(Number(stepAt(event))));
    box.addEventListener("keydown", (event) => {
        const name = context.steps[at];
        const layer = layerOf(name);
        const inLayer = (l) => context.steps.indexOf(`layers.${l}.${shortName(name)}`);
        const to = {
            ArrowLeft: at - 1,
            ArrowRight: at + 1,
            ArrowUp: layer < 0 ? -1 : inLayer(layer - 1),
            ArrowDown: layer < 0 ? -1 : inLayer(layer + 1),
            Home: 0,
            End: context.steps.length - 1,
        }[event.key];
        if (to === undefined) return;
        event.preventDefault();
        event.stopPropagation();
        if (context.steps[to]) go(to);
    });
    new ResizeObserver(([{ contentRect }]) => {
        if (contentRect.width === width) return;
        width = contentRect.width;
        drawn = null;
        view.redraw();
    }).observe(box);
    return view;
}
