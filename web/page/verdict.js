// What `golden diff` says of two traces, as a table.

import { h } from "./dom.js";
import { firstBad, scientific, verdict } from "./diff.js";

export function verdictView(reports, { onStep } = {}) {
    const bad = firstBad(reports);
    const rows = reports.filter((r) => !r.missing);
    const shown = (r) =>
        h(
            "tr",
            { class: r.ok ? "" : r === bad ? "bad first" : "bad" },
            h(
                "th",
                { scope: "row" },
                onStep ? h("button", { type: "button", class: "link", onclick: () => onStep(r.name) }, r.name) : r.name,
            ),
            h("td", { class: "number" }, scientific(r.error)),
            h("td", {}, `${r.note || "equal"}${r === bad ? " ← the first" : ""}`),
        );
    const table = (list) =>
        h(
            "table",
            { class: "verdict" },
            h(
                "thead",
                {},
                h(
                    "tr",
                    {},
                    ["step", "error", "what golden diff says (B: the judged program)"].map((c) =>
                        h("th", { scope: "col" }, c),
                    ),
                ),
            ),
            h("tbody", {}, list.map(shown)),
        );
    const [differ, agree] = [rows.filter((r) => !r.ok), rows.filter((r) => r.ok)];
    return h(
        "div",
        { class: "verdict-box" },
        h(
            "p",
            { class: bad ? "headline apart" : "headline same", "data-first": bad?.name ?? "" },
            bad ? ["The first step that comes out wrong: ", h("b", {}, bad.name)] : "Every step agrees.",
        ),
        h("p", { class: "source-name" }, "In the words of golden diff:"),
        h("p", { class: "diff-line" }, h("code", {}, verdict(reports))),
        strip(reports, bad),
        differ.length ? h("div", { class: "table-box", tabindex: "0" }, table(differ)) : null,
        h(
            "details",
            {},
            h("summary", {}, `The ${agree.length} steps that agree`),
            h("div", { class: "table-box", tabindex: "0" }, table(agree)),
        ),
    );
}

// A mark per step, in the order of computation.
function strip(reports, bad) {
    return h(
        "ol",
        { class: "strip", "aria-label": "all steps in order; marked ones differ" },
        reports.map((r) =>
            h("li", {
                class: r.missing ? "missing" : r.ok ? "equal" : r === bad ? "bad first" : "bad",
                title: `${r.name}: ${r.missing ? "not there" : r.note || "equal"}`,
            }),
        ),
    );
}
