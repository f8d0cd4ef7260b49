// Elements of the page: building them, words of the glossary, heat maps.

import { full, short } from "./numbers.js";

// h("p", {class: "note", onclick: ...}, "text", child, ...)
export function h(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
        if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
        else if (value === true) element.setAttribute(name, "");
        else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(
        ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
    );
    return element;
}

const SVG = "http://www.w3.org/2000/svg";
export function svg(tag, attributes = {}, ...children) {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children.flat(Infinity));
    return element;
}

export const byId = (id) => document.getElementById(id);

// Does some work in a task of its own, so that none is long; of calls that follow each other, the last one's.
let waiting = 0;
export function afterwards(work) {
    clearTimeout(waiting);
    waiting = setTimeout(work);
}

// Text in which [[word]] is a word of the glossary: a button that shows what it means, below the paragraph. No line ends
// between it and what is written behind it.
export function guided(text, words) {
    return text.split(/(\[\[[^\]]*\]\]\S*)/).map((part, i) => {
        if (i % 2 === 0) return part;
        const [word, behind] = part.slice(2).split("]]");
        return h("span", { class: "term-box" }, term(word, words), behind);
    });
}

function term(word, words) {
    const meaning = words[word] ?? words[word.replace(/s$/, "")] ?? "";
    const button = h("button", { class: "term", type: "button", "aria-expanded": "false", title: meaning }, word);
    button.addEventListener("click", () => {
        const isOpen = button.getAttribute("aria-expanded") === "true";
        for (const other of document.querySelectorAll(".term[aria-expanded=true]"))
            other.setAttribute("aria-expanded", "false");
        for (const bubble of document.querySelectorAll(".bubble")) bubble.remove();
        if (isOpen) return;
        button.setAttribute("aria-expanded", "true");
        button.closest("p").after(h("p", { class: "bubble", role: "status" }, h("b", {}, word), `: ${meaning}`));
    });
    return button;
}

// ----------------------------------------------------------------------------
// Colours: cold below zero, warm above, by the square root of the size so that small values can be told apart.

function style(name) {
    return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

const SHADES = 255; // on either side of zero
let palette = null; // shades from low to high, {colour, ink, pixel}: as CSS has them, and in the bytes of an ImageData
const pixelOf = (...rgb) => new Uint32Array(Uint8Array.of(...rgb, 255).buffer)[0];
const NO_NUMBER = pixelOf(255, 0, 255);
const numbersOf = (name) => style(name).split(/[ ,]+/).map(Number);
function shades() {
    const [zero, low, high] = ["--heat-zero", "--heat-low", "--heat-high"].map(numbersOf);
    return Array.from({ length: 2 * SHADES + 1 }, (_, i) => {
        const end = i < SHADES ? low : high;
        const rgb = zero.map((z, k) => Math.round(z + ((end[k] - z) * Math.abs(i - SHADES)) / SHADES));
        const light = rgb
            .map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4))
            .reduce((sum, c, k) => sum + c * [0.2126, 0.7152, 0.0722][k], 0);
        return { colour: `rgb(${rgb.join(",")})`, ink: light > 0.179 ? "#000" : "#fff", pixel: pixelOf(...rgb) };
    });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    palette = null;
    for (const box of document.querySelectorAll(".heat")) box.redraw();
});

// t from -1 to 1
function shade(t) {
    palette ??= shades();
    return palette[SHADES + Math.round(Math.sign(t) * SHADES * Math.sqrt(Math.min(1, Math.abs(t))))];
}
export const colour = (t) => shade(t).colour;

// Black or white, whichever stands out more from a colour: 4.58 to 1 at least (WCAG 1.4.3, relative luminance).
export const inkOn = (t) => shade(t).ink;

// A picture of `values`, a pixel each: a canvas, until the next one is made.
const sketch = h("canvas").getContext("2d", { willReadFrequently: true });
function pixels(values, columns, most, isHidden) {
    const image = new ImageData(columns, Math.ceil(values.length / columns));
    const data = new Uint32Array(image.data.buffer);
    values.forEach((x, i) => {
        if (!isHidden?.(i)) data[i] = Number.isFinite(x) ? shade(most ? x / most : 0).pixel : NO_NUMBER;
    });
    Object.assign(sketch.canvas, { width: image.width, height: image.height });
    sketch.putImageData(image, 0, 0);
    return sketch.canvas;
}

const MANY = 1000; // values that are painted in a task of their own

// A heat map of `values`, `columns` to a row, on a canvas that takes the keyboard: arrows move a cursor, Enter chooses.
// options: label; columns; rowLabel(row) and rowNote(row): text left and right of a row; describe(i): what the
// readout says of cell i; from: where the legend begins, if not at the smallest value; choose(i): a cell is clicked; marked(i): whether a
// cell is outlined; hidden(i): whether it is left out; most: what full colour means; selected.
export function heatMap(values, options) {
    const most = options.most ?? values.reduce((size, x) => Math.max(size, Number.isFinite(x) ? Math.abs(x) : 0), 0);
    const rows = Math.ceil(values.length / options.columns);
    const canvas = h("canvas", {
        tabindex: "0",
        role: options.choose ? "application" : "img",
        "aria-roledescription": "heat map",
        "aria-label": `${options.label}: ${values.length} values, smallest ${short(minimum(values))}, largest ${short(maximum(values))}.${options.choose ? " Arrow keys move, Enter explains." : ""}`,
    });
    const readout = h("p", { class: "readout", "aria-live": "polite" });
    let cursor = options.selected ?? -1;
    const bar = legend(values, most, options.from);
    const left = h("div", { class: "row-labels" });
    const right = h("div", { class: "row-notes" });
    for (let r = 0; r < rows; r++) {
        if (options.rowLabel) left.append(h("span", {}, options.rowLabel(r) ?? ""));
        if (options.rowNote) right.append(h("span", {}, options.rowNote(r) ?? ""));
    }
    const box = h(
        "div",
        { class: "heat" },
        h(
            "div",
            { class: "heat-grid" },
            options.rowLabel ? left : null,
            h("div", { class: "canvas-box" }, canvas),
            options.rowNote ? right : null,
        ),
        bar,
        readout,
        options.choose ? nudges() : null,
    );
    let width = 0; // of the canvas' box
    let cell = 10;
    let height = 18;

    // A finger covers several cells: with these it goes to the one that it meant.
    function nudges() {
        const by = (n, sign, name) =>
            h("button", { type: "button", "aria-label": name, onclick: () => chooseAt(cursor + n) }, sign);
        return h(
            "p",
            { class: "nudge" },
            by(-1, "◀", "number before"),
            by(1, "▶", "next number"),
            by(-options.columns, "▲", "number above"),
            by(options.columns, "▼", "number below"),
        );
    }
    function chooseAt(i) {
        if (i < 0 || i >= values.length) return;
        move(i);
        options.choose?.(i);
    }
    function fit() {
        cell = width / options.columns;
        height = options.square
            ? Math.min(cell, 22)
            : rows > 12
              ? Math.max(9, Math.min(14, cell))
              : Math.max(20, Math.min(30, cell * 2.2));
        if (options.square) cell = height;
        const ratio = devicePixelRatio || 1;
        const shown = cell * Math.min(options.columns, values.length);
        canvas.style.width = `${shown}px`;
        canvas.style.height = `${height * rows}px`;
        canvas.width = Math.round(shown * ratio);
        canvas.height = Math.round(height * rows * ratio);
        left.style.setProperty("--row", `${height}px`);
        right.style.setProperty("--row", `${height}px`);
    }
    function paint() {
        const g = canvas.getContext("2d");
        const ratio = devicePixelRatio || 1;
        const shown = cell * Math.min(options.columns, values.length);
        g.setTransform(ratio, 0, 0, ratio, 0, 0);
        const gap = cell > 7 ? 1 : 0;
        g.imageSmoothingEnabled = false;
        g.drawImage(pixels(values, options.columns, most, options.hidden), 0, 0, cell * options.columns, height * rows);
        for (let c = 1; gap && c <= options.columns; c++) g.clearRect(c * cell - gap, 0, gap, height * rows);
        for (let r = 1; r <= rows; r++) g.clearRect(0, r * height - 1, shown, 1);
        for (let i = 0; options.marked && i < values.length; i++) {
            if (!options.marked(i)) continue;
            g.strokeStyle = style("--bad");
            g.lineWidth = 3;
            const [x, y] = [(i % options.columns) * cell, Math.floor(i / options.columns) * height];
            g.strokeRect(x + 1, y + 1, Math.max(cell - gap - 2, 3), height - 3);
        }
        if (cursor >= 0) {
            g.strokeStyle = style("--ink");
            g.lineWidth = 2;
            g.strokeRect(
                (cursor % options.columns) * cell,
                Math.floor(cursor / options.columns) * height,
                Math.max(cell - gap, 3),
                height - 1,
            );
        }
    }
    function draw() {
        if (!width) return;
        fit();
        paint();
    }
    function say(i) {
        readout.textContent =
            i < 0 ? (options.hint ?? "") : options.describe ? options.describe(i) : `[${i}] ${full(values[i])}`;
    }
    function move(i) {
        cursor = i;
        draw();
        say(i);
    }
    const at = (event) => {
        const box = canvas.getBoundingClientRect();
        const column = Math.floor((event.clientX - box.left) / cell);
        const row = Math.floor((event.clientY - box.top) / height);
        const i = row * options.columns + column;
        return column >= 0 && column < options.columns && i >= 0 && i < values.length ? i : -1;
    };
    canvas.addEventListener("pointermove", (event) => say(at(event)));
    canvas.addEventListener("pointerleave", () => say(cursor));
    canvas.addEventListener("click", (event) => {
        chooseAt(at(event));
    });
    canvas.addEventListener("keydown", (event) => {
        const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -options.columns, ArrowDown: options.columns }[event.key];
        if (by) {
            const to = cursor < 0 ? 0 : cursor + by;
            if (to >= 0 && to < values.length) move(to);
        } else if (event.key === "Home") move(0);
        else if (event.key === "End") move(values.length - 1);
        else if ((event.key === "Enter" || event.key === " ") && cursor >= 0) options.choose?.(cursor);
        else return;
        event.preventDefault();
        event.stopPropagation();
    });
    new ResizeObserver(([{ contentRect }]) => {
        width = contentRect.width;
        if (!width) return;
        fit();
        if (values.length > MANY) setTimeout(paint);
        else paint();
    }).observe(canvas.parentElement);
    box.redraw = () => {
        draw();
        bar.draw();
    };
    say(cursor);
    box.canvas = canvas;
    return box;
}

const minimum = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const maximum = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

// The colours between two values: from the smallest, or `from`, to the largest.
function legend(values, most, from = minimum(values)) {
    const to = maximum(values);
    const bar = h("span", { class: "legend-bar", "aria-hidden": "true" });
    const box = h(
        "p",
        { class: "legend" },
        `${from === minimum(values) ? "smallest " : ""}${short(from)}`,
        bar,
        `${short(to)} largest`,
    );
    box.draw = () => {
        const stops = Array.from({ length: 9 }, (_, i) => colour(most ? (from + ((to - from) * i) / 8) / most : 0));
        bar.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
    };
    box.draw();
    return box;
}

// A line chart: series of {name, values, class}, named in it; x is 0 .. n - 1 with labels; y logarithmic. A zero, which has
// no place there, is on a line of its own below. width: in pixels.
export function lineChart(series, labels, title, width) {
    const height = width < 560 ? 210 : 260;
    const [left, right, bottom, top] = [52, 24, 30, 26];
    const all = series.flatMap((s) => s.values).filter(Number.isFinite);
    const hasZero = all.includes(0);
    const low = Math.floor(Math.log10(Math.min(1, ...all.filter((v) => v > 0)))) - Number(hasZero);
    const high = Math.ceil(Math.log10(Math.max(10 ** (low + 1), ...all)));
    const x = (i) => left + (i * (width - left - right)) / Math.max(1, labels.length - 1);
    const y = (v) => height - bottom - (v > 0 ? ((Math.log10(v) - low) / (high - low)) * (height - bottom - top) : 0);
    const chart = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": title });
    for (let e = low; e <= high; e++) {
        chart.append(svg("line", { x1: left, x2: width - right, y1: y(10 ** e), y2: y(10 ** e), class: "grid" }));
        const size = hasZero && e === low ? 0 : 10 ** e;
        const label = e >= -1 ? `${Math.round(100 * size)} %` : `${Number((100 * size).toPrecision(1))} %`;
        chart.append(svg("text", { x: left - 6, y: y(10 ** e) + 4, "text-anchor": "end" }, label));
    }
    labels.forEach((label, i) => {
        if (label && (width > 560 || i % 4 === 0))
            chart.append(svg("text", { x: x(i), y: height - bottom + 18, "text-anchor": "middle" }, label));
    });
    for (const s of series) {
        const points = s.values
            .map((v, i) => (Number.isFinite(v) ? `${x(i)},${y(v)}` : ""))
            .join(" ")
            .trim();
        chart.append(svg("polyline", { points, class: `line ${s.class}` }));
        s.values.forEach((v, i) => {
            if (!Number.isFinite(v)) return;
            const dot = svg("circle", { cx: x(i), cy: y(v), r: 3.2, class: s.class });
            dot.append(svg("title", {}, `${s.name}, ${labels[i] || i}: ${short(100 * v)} %`));
            chart.append(dot);
        });
    }
    const near = (s, end) =>
        [s.values[end], s.values[end - 1], s.values[end - 2]].filter(Number.isFinite).slice(0, 2).map(y);
    // Names at the last points, on the side where the other line is not.
    const ends = series.map((s) => s.values.findLastIndex(Number.isFinite));
    series.forEach((s, i) => {
        const end = ends[i];
        const other = series.find((o) => o !== s)?.values[end];
        const isBelow = Number.isFinite(other) && s.values[end] < other;
        const place = {
            x: x(end) + 6,
            y: isBelow ? Math.max(...near(s, end)) + 18 : Math.min(...near(s, end)) - 9,
            "text-anchor": "end",
        };
        chart.append(svg("text", { ...place, class: `name ${s.class}` }, s.name));
    });
    chart.append(svg("text", { x: left, y: 12, class: "axis-name" }, "error, logarithmic"));
    return chart;
}
