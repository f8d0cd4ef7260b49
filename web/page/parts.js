// Parts of explanations: figures in a row, lines of the programs, tables of products.

import { h } from "./dom.js";
import { placeOf } from "./inputs.js";
import { full, whole } from "./numbers.js";

export function panel(name, t, i, context, ...children) {
    const value = context.trace[name].row(t)[i];
    return h(
        "section",
        { class: "explain", "aria-label": "how this number came about" },
        h(
            "h3",
            {},
            `How ${placeOf(name, i, context)} came about: `,
            h("span", { class: "value" }, context.trace[name].isWhole ? whole(value) : full(value)),
        ),
        ...children,
        context.trace[name].isWhole ? null : native(),
    );
}

function native() {
    return h(
        "details",
        { class: "loop" },
        h("summary", {}, "And outside the browser?"),
        h(
            "p",
            {},
            "This is the program's own code, compiled to WebAssembly. Compiled for a processor, it finds the same numbers, to the bit: the numeric contract says in which order every sum is added up.",
        ),
    );
}

// Whether the number found here is that of the program in WebAssembly, to the bit.
export function agreement(found, value) {
    if (found === value) return h("span", { class: "same" }, "= the value of the program in WebAssembly, to the bit ✓");
    return h("span", { class: "apart" }, `the value of the program in WebAssembly is ${full(value)}`);
}

export function sourceOf(functionName, context) {
    const program = context.data.programs[context.model.program];
    const part = program.functions[functionName];
    return h(
        "details",
        { class: "loop" },
        h("summary", {}, `The loop that says so: ${program.source}, line ${part.first}`),
        codeLines(part, -1),
    );
}

export function codeLines(part, mark) {
    return h(
        "pre",
        { class: "code", tabindex: "0" },
        part.lines.map((line, i) =>
            h(
                "span",
                { class: i === mark ? "line mark" : "line" },
                h("span", { class: "number", "aria-hidden": "true" }, String(part.first + i)),
                line,
                "\n",
            ),
        ),
    );
}

export const figure = (value, caption, kind = "") =>
    h("span", { class: `figure ${kind}` }, h("b", {}, value), h("small", {}, caption));
export const sign = (text) => h("span", { class: "sign" }, text);

// A row of figures. A line ends before a sign, never behind it.
export function formula(...parts) {
    const pieces = [];
    for (const part of parts.flat(Infinity).filter(Boolean)) {
        const before = pieces.at(-1)?.at(-1);
        if (before?.classList.contains("sign")) pieces.at(-1).push(part);
        else pieces.push([part]);
    }
    return h(
        "p",
        { class: "formula" },
        pieces.map((piece) => (piece.length > 1 ? h("span", { class: "piece" }, piece) : piece)),
    );
}

// A table of products, added up in fp64 and rounded once.
export function listed(rows, columns, limit = 400) {
    return h(
        "div",
        { class: "table-box", tabindex: "0" },
        h(
            "table",
            { class: "sums" },
            h(
                "thead",
                {},
                h(
                    "tr",
                    {},
                    columns.map((c) => h("th", { scope: "col" }, c)),
                ),
            ),
            h(
                "tbody",
                {},
                rows.slice(0, limit).map((row) =>
                    h(
                        "tr",
                        {},
                        row.map((cell) => h("td", {}, cell)),
                    ),
                ),
            ),
        ),
    );
}
