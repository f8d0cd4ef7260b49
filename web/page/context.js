// A run that is looked at: its trace, the model's weights, the texts of tokens.

import { data, traceRun, weightsOf } from "./runner.js";
import { readTrace, walkSteps } from "./trace.js";

export async function contextOf(name, traceBytes, nPrompt, digest) {
    const model = data.models[name];
    const trace = readTrace(traceBytes);
    const vocabulary = data.vocabularies[model.model];
    const tokens = trace.tokens.values;
    const characters = charactersOf(Array.from(tokens, (id) => vocabulary[id] ?? ""));
    return {
        name,
        model,
        trace,
        data,
        vocabulary,
        nPrompt,
        digest, // of the logits by which the new tokens were drawn
        weights: await weightsOf(name),
        steps: walkSteps(trace, data.contract.order),
        tokens,
        textOf: (t) => vocabulary[tokens[t]] ?? "",
        partOf: (t) => characters[t], // the character of which a token is some bytes, or ""
        // In a sentence.
        said: (t) =>
            ((vocabulary[tokens[t]] ?? "").trim() || "␣") + (characters[t] ? `, a byte of ${characters[t]}` : ""),
        // The ids that the model wrote: those behind the prompt, and the most probable one behind the last.
        get newIds() {
            const last = mostProbable(trace.logits.row(tokens.length - 1));
            return [...tokens.subarray(nPrompt ?? tokens.length), last];
        },
    };
}

// The bytes of a token that is no text of its own: <0xD7> in the vocabulary; null of any other.
const bytesOf = (text) =>
    /^(<0x[0-9A-F]{2}>)+$/.test(text) ? text.match(/[0-9A-F]{2}(?=>)/g).map((byte) => Number.parseInt(byte, 16)) : null;

// The text of tokens, bytes put together to characters.
export function textOfTokens(texts) {
    const encoder = new TextEncoder();
    return new TextDecoder().decode(
        Uint8Array.from(texts.flatMap((text) => bytesOf(text) ?? [...encoder.encode(text)])),
    );
}

// The character that each token is some bytes of, isolated from the direction of what stands around it; "" where it is
// text of its own, or its bytes make none.
function charactersOf(texts) {
    const found = texts.map(() => "");
    const bytes = texts.map(bytesOf);
    for (let t = 0; t < bytes.length; t++) {
        const lead = bytes[t]?.[0] ?? 0;
        const length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2; // of the character, UTF-8
        let end = t;
        const all = [];
        while (end < bytes.length && bytes[end] && all.length < length) all.push(...bytes[end++]);
        const text = new TextDecoder().decode(Uint8Array.from(all));
        if (all.length === length && !text.includes("\ufffd")) {
            found.fill(`\u2068${text}\u2069`, t, end);
            t = end - 1;
        }
    }
    return found;
}

// Runs a model on a text: {prompt, newTokens}, or {ids, newTokens}.
export async function contextOfRun(name, options) {
    const result = await traceRun(name, options);
    return contextOf(name, result.trace, result.nPrompt, result.digest);
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
