// A run that is looked at: its trace, the model's weights, the texts of tokens.

import { data, traceRun, weightsOf } from "./runner.js";
import { readTrace, walkSteps } from "./trace.js";

export async function contextOf(name, traceBytes, nPrompt) {
    const model = data.models[name];
    const trace = readTrace(traceBytes);
    const vocabulary = data.vocabularies[model.model];
    const tokens = trace.tokens.values;
    return {
        name,
        model,
        trace,
        data,
        vocabulary,
        nPrompt,
        weights: await weightsOf(name),
        steps: walkSteps(trace, data.contract.order),
        tokens,
        textOf: (t) => vocabulary[tokens[t]] ?? "",
        said: (t) => (vocabulary[tokens[t]] ?? "").trim() || "␣", // in a sentence
        // The ids that the model wrote: those behind the prompt, and the most probable one behind the last.
        get newIds() {
            const last = mostProbable(trace.logits.row(tokens.length - 1));
            return [...tokens.subarray(nPrompt ?? tokens.length), last];
        },
    };
}

// Runs a model on a text: {prompt, newTokens}, or {ids, newTokens}.
export async function contextOfRun(name, options) {
    const result = await traceRun(name, options);
    return contextOf(name, result.trace, result.nPrompt);
}

// The largest; of equal ones the first.
export function mostProbable(logits) {
    let best = 0;
    for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
    return best;
}

// Which tokens may be drawn, the most probable first: {id, p} with p relative to all, and the kept ones' share.
// docs/numerics.md has the rule for temperature and top-p.
export function sampler(logits, temperature, topP) {
    const best = mostProbable(logits);
    // At 0 the most probable one has all; the others keep their order.
    if (temperature === 0) {
        const order = Array.from(logits.keys()).sort((a, b) => logits[b] - logits[a] || a - b);
        const only = (id) => Number(id === best);
        return { keptCount: 1, all: order.map((id) => ({ id, p: only(id), kept: id === best, share: only(id) })) };
    }
    const powers = Float32Array.from(logits, (x) => Math.exp((x - logits[best]) / temperature));
    let total = 0;
    for (const p of powers) total += p;
    const order = Array.from(powers.keys()).sort((a, b) => powers[b] - powers[a] || a - b);
    let sum = 0;
    let n = 0;
    while (n < order.length && (n === 0 || sum < topP * total)) sum += powers[order[n++]];
    return {
        keptCount: n,
        all: order.map((id, i) => ({ id, p: powers[id] / total, kept: i < n, share: i < n ? powers[id] / sum : 0 })),
    };
}
