// The third view: programs with one mistake, and the step by which `golden diff` finds it.

import { byId, h, heatMap } from "./dom.js";
import { full } from "./numbers.js";
import { partedAfter, statusLine, words, working } from "./choose.js";
import { contextOfRun } from "./context.js";
import { compare, firstBad } from "./diff.js";
import { data, ProgramError, traceRun } from "./runner.js";
import { readTrace, shortName } from "./trace.js";
import { hasPlaces, keep, nameIn, saidWrong } from "./url.js";
import { verdictView } from "./verdict.js";

const names = Object.keys(data.variants ?? {});
let chosen = names[0];
let ran = null; // the mistake that is shown
let run = null;

export function startBreak() {
    const root = byId("break");
    root.append(
        h("h2", { id: "break-title", class: "quiet" }, "Break it"),
        h(
            "p",
            { class: "intro" },
            "Each of these programs has one small mistake in it. The text that it writes often looks right all the same. So the page lays all the numbers of the broken program beside those of the right one, step by step, and says at which step they first part. Choose a mistake, run it, and look where it shows.",
        ),
    );
    if (!chosen) return root.append(h("p", {}, "This copy of the page has no broken programs."));
    const status = statusLine();
    const view = h("div", { id: "break-view" });
    const button = h("button", { type: "submit", class: "primary" }, "Run it broken");
    const form = h(
        "form",
        {},
        h(
            "fieldset",
            { class: "variants" },
            h("legend", { class: "quiet" }, "The mistake"),
            Object.entries(data.variants).map(([name, v]) =>
                h(
                    "label",
                    {},
                    h("input", {
                        type: "radio",
                        name: "variant",
                        value: name,
                        checked: name === chosen,
                        onchange: () => (chosen = name),
                    }),
                    h("span", {}, h("b", {}, v.title), h("small", {}, v.text)),
                ),
            ),
        ),
        button,
        status,
    );
    form.addEventListener("submit", (event) => {
        event.preventDefault();
        run();
    });
    run = () =>
        working(button, status, "The right program and the broken one run ...", async (isLast) => {
            const name = chosen;
            ran = null;
            await runVariant(name, view, isLast);
            if (!isLast()) return;
            ran = name;
            keep(true);
        });
    root.append(form, view);
    hasPlaces("break", () => ({ mistake: ran }));
}

// Runs the mistake that the address names.
export async function visitBreak(of) {
    if (!of.has("mistake") || !run || of.get("mistake") === ran) return;
    const wrong = [];
    const mistake = nameIn(of, "mistake", names, null, wrong);
    if (!mistake) return byId("break").querySelector(".status").failed(saidWrong(wrong));
    chosen = mistake;
    byId("break").querySelector(`[name=variant][value=${chosen}]`).checked = true;
    await run();
}

// The traces that were judged last: tests look at them.
export let judgedTraces = null;

async function runVariant(name, view, isLast) {
    const variant = data.variants[name];
    view.replaceChildren();
    const bytes = variant.file ? await fetchBytes(variant.file) : undefined;
    const mistake = { program: variant.program, bytes };
    const story = { prompt: variant.prompt, newTokens: 24 };
    const rightStory = await contextOfRun(variant.model, story);
    const judged = { ids: rightStory.tokens.subarray(0, rightStory.nPrompt), newTokens: 1 };
    const right = await traceRun(variant.model, judged);
    let wrong;
    let wrongStory;
    try {
        wrong = await traceRun(variant.model, { ...judged, ...mistake });
        wrongStory = await contextOfRun(variant.model, { ...story, ...mistake });
    } catch (error) {
        if (!(error instanceof ProgramError)) throw error;
        if (!isLast()) return;
        view.replaceChildren(
            change(variant),
            h(
                "section",
                { class: "card" },
                h("h3", {}, "It does not run"),
                h("p", { class: "printed" }, error.message),
            ),
        );
        return;
    }
    if (!isLast()) return;
    judgedTraces = [right.trace, wrong.trace];
    const [a, b] = judgedTraces.map(readTrace);
    const reports = compare(a, b, data.contract);
    const bad = firstBad(reports);
    const step = bad ? shortName(bad.name.replace(/\.s$/, ".q")) : null;
    view.replaceChildren(
        change(variant),
        h(
            "section",
            { class: "card" },
            h("h3", {}, "Where it goes wrong"),
            verdictView(reports),
            bad ? sideBySide(a, b, bad.name) : null,
            h(
                "p",
                { class: "note" },
                `Both programs ran on the ${judged.ids.length} tokens of “${variant.prompt}”. The comparison is that of “golden diff”, a command of this repository, on what each program wrote down (its trace); it counts scales and sums as steps of their own.${data.steps[step] ? ` The step is “${data.steps[step].title}” of the first view.` : ""}`,
            ),
        ),
        h("section", { class: "card" }, h("h3", {}, "What they write"), texts(rightStory, wrongStory)),
    );
    view.scrollIntoView({ block: "start" });
}

// The step at which they part, of the first token that differs.
function sideBySide(right, wrong, name) {
    const [x, y] = [right[name], wrong[name]];
    if (!x || !y || x.size !== y.size || x.perToken > 400) return null;
    const differs = (t) => x.row(t).some((v, i) => v !== y.row(t)[i]);
    const token = Array.from({ length: x.shape[0] }, (_, t) => t).find(differs) ?? 0;
    const most = x.row(token).reduce((size, v) => Math.max(size, Math.abs(v)), 0);
    const columns = x.perToken % 64 || innerWidth < 720 ? (x.perToken % 32 ? x.perToken : 32) : 64;
    const map = (values, label) =>
        heatMap(values, {
            label,
            columns,
            most,
            marked: (i) => x.row(token)[i] !== y.row(token)[i],
            describe: (i) => `value ${i}: right ${full(x.row(token)[i])}, broken ${full(y.row(token)[i])}`,
        });
    return h(
        "div",
        {},
        h("h4", {}, `${name} of token ${token}: what differs is outlined. Right`),
        map(x.row(token), "right"),
        h("h4", {}, "Broken"),
        map(y.row(token), "broken"),
    );
}

async function fetchBytes(url) {
    const answer = await fetch(url);
    if (!answer.ok) throw new Error(`${url}: ${answer.status} ${answer.statusText}`);
    return answer.arrayBuffer();
}

// The changed line as a diff of the source.
function change(variant) {
    return h(
        "section",
        { class: "card" },
        h("h3", {}, variant.title),
        h("p", { class: "source-name" }, variant.source),
        h(
            "pre",
            { class: "code", tabindex: "0" },
            variant.diff.map((line) =>
                h(
                    "span",
                    { class: `line ${line.startsWith("-") ? "gone" : line.startsWith("+") ? "come" : ""}` },
                    ` ${line}\n`,
                ),
            ),
        ),
        variant.others.length
            ? h(
                  "p",
                  { class: "note" },
                  `Changed as well, so that the mistake takes effect: ${variant.others.join("; ")}.`,
              )
            : null,
    );
}

function texts(a, c) {
    const [x, y] = [a.newIds, c.newIds];
    let same = 0;
    while (same < x.length && same < y.length && x[same] === y[same]) same++;
    const prompt = words(Array.from(a.tokens.subarray(0, a.nPrompt)), a.vocabulary).replace(/<\|[^|]*\|>/g, "");
    const text = (title, ids) =>
        h(
            "div",
            {},
            h("h4", {}, title),
            h(
                "p",
                { class: "story" },
                h("span", { class: "begun" }, prompt),
                h("b", {}, words(ids.slice(0, same), a.vocabulary)),
                h("span", { class: "parted" }, words(ids.slice(same), a.vocabulary)),
            ),
        );
    return [
        h(
            "p",
            {},
            same === x.length
                ? `The same ${same} tokens: reading the text alone, nobody would notice.`
                : partedAfter(same),
        ),
        h("div", { class: "side" }, text("Right", x), text("Broken", y)),
    ];
}
