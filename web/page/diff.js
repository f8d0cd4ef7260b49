// The verdict of `golden diff A B` on two traces: golden/trace.py in JavaScript. A step is equal to the bit, or wrong; only
// traces with fp16 tensors have tolerances (data.json). tests/test_web.py holds the two to each other.

import { Tensor, sortedSteps } from "./trace.js";

// |a - b| / |a| by norm; 0 if both are zero, infinite if either is not finite.
export function relativeError(a, b) {
    let norm = 0;
    let difference = 0;
    for (let i = 0; i < a.length; i++) {
        if (!Number.isFinite(a[i]) || !Number.isFinite(b[i])) return Infinity;
        norm += a[i] * a[i];
        difference += (a[i] - b[i]) ** 2;
    }
    if (norm) return Math.sqrt(difference) / Math.sqrt(norm);
    return difference === 0 ? 0 : Infinity;
}

const report = (name, error, note, ok) => ({ name, error, note, ok, missing: false });

// Numbers as whole numbers of which neighbours differ by 1, to count units in the last place.
function ordered(bits) {
    const least = -(2 ** (8 * bits.BYTES_PER_ELEMENT - 1));
    return Array.from(bits, (x) => (x < 0 ? least - x : x));
}

// Whether y, a step of a port, is what it should be. limit: relative by norm, of whole numbers the share; 0: to the bit.
function judgeStep(name, x, y, limit) {
    if (String(x.shape) !== String(y.shape) || x.type !== y.type)
        return report(name, Infinity, `${y.type} ${tuple(y.shape)}, expected ${x.type} ${tuple(x.shape)}`, false);
    if (!x.size) return report(name, Infinity, "no values", false);
    const [a, b] = [x.bits, y.bits];
    const n = a.reduce((sum, v, i) => sum + (v !== b[i]), 0);
    if (n === 0) return report(name, 0, "", true);
    let note = `${n} of ${x.size} differ`;
    let error = n / x.size;
    if (!x.isWhole) {
        const [c, d] = [ordered(a), ordered(b)];
        const most = c.reduce((most, v, i) => Math.max(most, Math.abs(v - d[i])), 0);
        note += `, by up to ${most} units in the last place`;
        error = relativeError(x.values, y.values);
    }
    return report(name, error, note, limit > 0 && limit >= error);
}

// What the result of one operation is held to where sums may be taken in any order, relative by norm.
function opTolerance(name, tensor, contract) {
    if (tensor.isWhole) return 0;
    if (tensor.type !== "float16") return contract.op;
    return name.endsWith("attn.mix") ? contract.half_mix : contract.half;
}

const tuple = (shape) => (shape.length === 1 ? `(${shape[0]},)` : `(${shape.join(", ")})`);
const isCached = (name, contract) => name === "tokens" || contract.cached.some((end) => name.endsWith(end));

// What a trace of some positions has, from the trace of a whole run.
export function atPositions(trace, positions, contract) {
    const chosen = Array.from(positions);
    const found = { positions: new Tensor("int32", [chosen.length], Int32Array.from(chosen)) };
    for (const [name, tensor] of Object.entries(trace))
        found[name] = isCached(name, contract) ? tensor : tensor.rows(chosen);
    return found;
}

// Every step of the two traces, in the order of computation: {name, error, note, ok, missing}.
export function compare(a, b, contract) {
    const isClose = Object.values(a).some((tensor) => tensor.type === "float16");
    const reports = [];
    let behind = 0; // the tolerance of what comes behind an fp16 value that was rounded the other way
    for (const name of sortedSteps([...new Set([...Object.keys(a), ...Object.keys(b)])], contract.order)) {
        if (!(name in b)) {
            reports.push({ ...report(name, Infinity, "missing", false), missing: true });
        } else if (!(name in a)) {
            reports.push(report(name, Infinity, "A has no such step", false));
        } else {
            const limit = isClose ? Math.max(behind, opTolerance(name, a[name], contract)) : 0;
            reports.push(judgeStep(name, a[name], b[name], limit));
            if (a[name].type === "float16" && reports.at(-1).error > 0) behind = contract.half_pass;
        }
    }
    return reports;
}

// Python's {:.2e}
export const scientific = (x) => (x === Infinity ? "inf" : x.toExponential(2).replace(/e([+-])(\d)$/, "e$10$2"));

// The first step that is not as it should be, or null.
export const firstBad = (reports) => reports.find((r) => !r.ok && !r.missing) ?? null;

// The closing line of `golden diff`.
export function verdict(reports) {
    const judged = reports.filter((r) => !r.missing);
    const bad = judged.filter((r) => !r.ok);
    const worst = judged.reduce((most, r) => (r.error > most.error ? r : most), { error: 0 });
    const good = worst.error === 0 ? "equal to the bit" : "within their tolerances";
    let text = `all ${judged.length} steps are ${good}`;
    if (!judged.some((r) => r.name !== "tokens")) text = "nothing to judge";
    else if (bad.length) text = `${bad.length} of ${judged.length} steps differ, the first at ${bad[0].name}`;
    else if (judged.length < reports.length)
        text = `${judged.length} of ${reports.length} steps are there, all ${good}`;
    if (worst.error > 0) text += `; largest error ${scientific(worst.error)} at ${worst.name}`;
    return text;
}
