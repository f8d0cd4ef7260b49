// The fourth view: a trace file of somebody's own port, judged as `golden diff` does.

import { byId, h } from "./dom.js";
import { filePlace, modelChoice, statusLine } from "./choose.js";
import { atPositions, compare } from "./diff.js";
import { data, traceRun } from "./runner.js";
import { readTrace } from "./trace.js";
import { verdictView } from "./verdict.js";

let model = "q8";
let last = null;

export function startPort() {
    const status = statusLine();
    const view = h("div", { id: "port-view" });
    const drop = filePlace("port-file", ".safetensors", "a trace file", take);
    const own = h(
        "button",
        { type: "button", class: "link", onclick: () => save(own) },
        "Save a trace of the program's own, to look at or to change",
    );
    async function take(file) {
        last = file;
        view.replaceChildren();
        status.busy(`${file.name} is judged ...`);
        try {
            view.replaceChildren(
                h(
                    "section",
                    { class: "card" },
                    h("h3", {}, file.name),
                    verdictView(await judge(await file.arrayBuffer(), model)),
                ),
            );
            status.done();
        } catch (error) {
            status.failed(`${file.name}: ${error.message}`);
        }
    }
    byId("port").append(
        h("h2", { id: "port-title", class: "quiet" }, "Check your own program"),
        h(
            "p",
            { class: "intro" },
            "You are writing a program that runs such a model? Write your steps into a safetensors file under the names of the first view. The page runs the right program on the same tokens and says where yours parts from it: the verdict of “golden diff”, for which every number has to be equal, to the bit. Your file is not sent anywhere.",
        ),
        modelChoice("Your trace is of", "port-model", Object.keys(data.models), "q8", (name) => {
            model = name;
            if (last) take(last);
        }),
        drop,
        h("p", {}, own),
        status,
        view,
    );
}

// Reports on a trace, by a run of the right program on its tokens. Throws with one line for a trace that cannot be judged.
export async function judge(bytes, name) {
    const b = readTrace(bytes);
    check(b, data.vocabularies[data.models[name].model].length);
    const result = await traceRun(name, { ids: b.tokens.values, newTokens: 1 });
    const whole = readTrace(result.trace);
    return compare("positions" in b ? atPositions(whole, b.positions.values, data.contract) : whole, b, data.contract);
}

// As golden/trace.py: check_tokens and check_positions.
function check(trace, vocabulary) {
    const tokens = trace.tokens;
    if (!tokens) throw new Error("the trace has no tokens");
    if (tokens.shape.length !== 1 || !tokens.isWhole)
        throw new Error(`tokens are ${tokens.type} (${tokens.shape}), expected a list of whole numbers`);
    if (!tokens.size) throw new Error("no tokens, expected 1 to the model's context");
    const wrong = tokens.values.findIndex((id) => id < 0 || id >= vocabulary);
    if (wrong >= 0)
        throw new Error(`token ${tokens.exact[wrong]} is no id below the model's vocab_size, ${vocabulary}`);
    if (!trace.positions) return;
    const at = trace.positions.values;
    if (trace.positions.shape.length !== 1 || !trace.positions.isWhole || !at.length)
        throw new Error("positions are no list of whole numbers");
    if (at.some((p, i) => p < 0 || p >= tokens.size || (i && p <= at[i - 1])))
        throw new Error(`positions are not ascending numbers from 0 to ${tokens.size - 1}`);
}

async function save(button) {
    button.disabled = true;
    const result = await traceRun(model, { prompt: data.models[model].prompt, newTokens: 4 });
    const url = URL.createObjectURL(new Blob([result.trace]));
    h("a", { href: url, download: `${model}.trace.safetensors` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
    button.disabled = false;
}
