// The verdict of `golden diff A B` on two traces: golden/trace.py in JavaScript, with its tolerances (data.json).
// tests/test_web.py holds the two to each other.

import { fround, roundHalfEven } from "./numbers.js";
import { Tensor, shortName, sortedSteps } from "./trace.js";

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

// Codes and scales of rows of values, as golden/q8.py has it.
function quantize(values, groupSize) {
    const codes = new Int8Array(values.length);
    const scales = new Float32Array(values.length / groupSize);
    for (let g = 0; g < scales.length; g++) {
        let amax = 0;
        for (let i = g * groupSize; i < (g + 1) * groupSize; i++) amax = Math.max(amax, Math.abs(values[i]));
        const inv = fround(127 / amax);
        if (!Number.isFinite(inv) || !(inv > 0)) continue;
        scales[g] = amax / 127;
        for (let i = g * groupSize; i < (g + 1) * groupSize; i++) {
            codes[i] = Math.min(127, Math.max(-127, roundHalfEven(fround(values[i] * inv))));
        }
    }
    return { codes, scales };
}

// golden/w8a8.py: under one given scale.
function quantizeStatic(values, scale, rows) {
    let inv = fround(1 / scale);
    if (!Number.isFinite(inv)) inv = 0;
    const codes = Int8Array.from(values, (x) => Math.min(127, Math.max(-127, roundHalfEven(fround(x * inv)))));
    return { codes, scales: new Float32Array(rows).fill(scale) };
}

// E4M3 in blocks under a power of two, golden/mx.py.
function quantizeMx(values, block) {
    const codes = new Uint8Array(values.length);
    const scales = new Uint8Array(values.length / block);
    for (let g = 0; g < scales.length; g++) {
        const part = values.subarray(g * block, (g + 1) * block);
        const amax = part.reduce((most, x) => Math.max(most, Math.abs(x)), 0);
        const undefinedBlock = Number.isNaN(amax);
        const shared = amax === 0 ? -127 : (Number.isFinite(amax) ? floorLog2(amax) : 128) - 8;
        scales[g] = undefinedBlock ? 255 : Math.max(shared, -127) + 127;
        const divisor = undefinedBlock ? Infinity : 2 ** (scales[g] - 127);
        part.forEach((x, i) => (codes[g * block + i] = encodeE4m3(x / divisor)));
    }
    return { codes, scales };
}

function floorLog2(x) {
    let exponent = Math.floor(Math.log2(x));
    while (2 ** exponent > x) exponent--;
    while (2 ** (exponent + 1) <= x) exponent++;
    return exponent;
}

function encodeE4m3(x) {
    if (Number.isNaN(x)) return 0x7f;
    const size = Math.min(Math.abs(x), 448);
    const sign = x < 0 || Object.is(x, -0) ? 0x80 : 0;
    if (size === 0) return sign;
    const exponent = Math.max(floorLog2(size), -6);
    const rounded = Math.min(roundHalfEven(size / 2 ** (exponent - 3)), 448 / 2 ** (exponent - 3));
    return sign | (((exponent + 7) << 3) + rounded - 8); // below the smallest normal the exponent's bits come out as 0
}

const equal = (a, b) => a.length === b.length && a.every((x, i) => x === b[i]);
const count = (a, b) => a.reduce((n, x, i) => n + (x !== b[i]), 0);

function isStatic(scales) {
    return scales.shape.length === 2 && scales.shape[1] === 1 && scales.values.every((s) => s === scales.values[0]);
}

const report = (name, error, note, ok) => ({ name, error, note, ok, missing: false });

// What is wrong with codes or scales as roundings of their own trace's values; null if nothing is.
function ownRounding(name, a, b) {
    const base = name.slice(0, -2);
    let fixed = null;
    for (const [which, trace] of [
        ["A", a],
        ["B", b],
    ]) {
        if (!(base in trace) || !(`${base}.s` in trace)) {
            return which === "B" ? null : report(name, Infinity, `A has no ${base} or no ${base}.s`, false);
        }
        const [value, codes, scales] = [trace[base], trace[name], trace[`${base}.s`]];
        if (!scales.size || codes.size % scales.size)
            return report(name, Infinity, `${which}'s scales do not divide its codes`, false);
        const isMx = codes.type === "uint8";
        const fits = value.type === "float32" && (isMx || codes.type === "int8");
        if (!fits || ![2, 3].includes(value.shape.length) || !equal(value.shape, codes.shape)) {
            const what = `${which}: ${codes.type} ${tuple(codes.shape)} of ${value.type} ${tuple(value.shape)}, expected int8 of float32`;
            return report(name, Infinity, what, false);
        }
        const groupSize = codes.size / scales.size;
        if (codes.shape.at(-1) % groupSize)
            return report(name, Infinity, `${which}'s scales do not divide its codes`, false);
        let expected = isMx ? quantizeMx(value.values, groupSize) : quantize(value.values, groupSize);
        if (which === "A" && !isMx && isStatic(scales) && !equal(expected.scales, scales.values))
            fixed = scales.values[0];
        if (fixed !== null) expected = quantizeStatic(value.values, fixed, value.shape[0]);
        const wrong = count(expected.codes, codes.values);
        if (wrong > 0)
            return report(name, wrong / codes.size, `${which}: ${wrong} codes are not its own rounding`, false);
        if (!equal(expected.scales, scales.values)) {
            const rule = fixed !== null ? "the static one of A" : "its own amax / 127";
            return report(`${base}.s`, Infinity, `${which}: scales are not ${rule}`, false);
        }
    }
    return null;
}

function compareCodes(name, a, b, behind, contract) {
    const wrong = ownRounding(name, a, b);
    if (wrong) return wrong;
    const [x, y] = [a[name].values, b[name].values];
    const flipped = count(x, y);
    const most = x.reduce((size, code, i) => Math.max(size, Math.abs(code - y[i])), 0);
    const note = flipped ? `${flipped} codes rounded the other way` : "";
    return report(name, flipped / x.length, note, most <= 1 || behind >= contract.past);
}

function compareAccumulators(name, a, b, contract) {
    const found = /^layers\.(\d{1,5})\.([\s\S]+)$/.exec(name.slice(0, -4));
    const codes = found && contract.inputs[found[2]] ? `layers.${found[1]}.${contract.inputs[found[2]]}.q` : "";
    const tokens = a[name].shape[0];
    const differs = (step) => Array.from({ length: tokens }, (_, t) => count(a[step].row(t), b[step].row(t)));
    const wrongAt = differs(name);
    const known = codes in a && codes in b && equal(a[codes].shape, b[codes].shape) && a[codes].shape[0] === tokens;
    const excused = known ? differs(codes) : wrongAt.map(() => 0);
    const wrong = wrongAt.reduce((n, m, t) => n + (excused[t] ? 0 : m), 0);
    const others = wrongAt.filter((n) => n > 0).length;
    const note = wrong ? `${wrong} differ` : others ? `of other codes in ${others} tokens` : "";
    return report(name, wrong / a[name].size, note, wrong === 0);
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
    const reports = [];
    let behind = 0; // the tolerance of what comes behind a value that was rounded the other way
    const past = new Set(); // rows of earlier tokens, in a trace of some positions
    const tokens = a.tokens.shape[0];
    if ("positions" in a) {
        for (let t = 0; t < tokens; t++) past.add(t);
        for (const t of a.positions.values) past.delete(t);
    }
    for (const name of sortedSteps([...new Set([...Object.keys(a), ...Object.keys(b)])], contract.order)) {
        if (!(name in b)) {
            reports.push({ ...report(name, Infinity, "missing", false), missing: true });
            continue;
        }
        if (!(name in a)) {
            reports.push(report(name, Infinity, "A has no such step", false));
            continue;
        }
        let [x, y] = [a[name], b[name]];
        if (!equal(x.shape, y.shape) || x.type !== y.type) {
            reports.push(
                report(name, Infinity, `${x.type} ${tuple(x.shape)} in A, ${y.type} ${tuple(y.shape)} in B`, false),
            );
        } else if (!x.size) {
            reports.push(report(name, Infinity, "no values", false));
        } else if (name.endsWith(".q")) {
            reports.push(compareCodes(name, a, b, behind, contract));
            if (reports.at(-1).error > 0) behind = Math.max(behind, contract.pass);
        } else if (name.endsWith(".acc") && /^int/.test(x.type) && x.shape.length > 1) {
            reports.push(compareAccumulators(name, a, b, contract));
        } else if (x.isWhole) {
            const same = equal(x.values, y.values);
            reports.push(report(name, same ? 0 : Infinity, same ? "" : "differ", same));
        } else {
            const limitOfOne =
                x.type !== "float16" ? contract.op : name.endsWith("attn.mix") ? contract.half_mix : contract.half;
            if (contract.cached.some((end) => name.endsWith(end)) && "positions" in a && x.shape[0] === tokens) {
                const [early, late] = [
                    [...past],
                    Array.from({ length: tokens }, (_, t) => t).filter((t) => !past.has(t)),
                ];
                const error = relativeError(x.rows(early).values, y.rows(early).values);
                if (error > contract.past)
                    reports.push(report(name, error, `in earlier tokens above ${contract.past}`, false));
                if (error > limitOfOne) behind = contract.past;
                [x, y] = [x.rows(late), y.rows(late)];
            }
            const error = relativeError(x.values, y.values);
            const limit = Math.max(behind, limitOfOne);
            reports.push(report(name, error, error <= limit ? "" : `above ${general(limit)}`, error <= limit));
            if (x.type === "float16" && error > 0) behind = Math.max(behind, contract.half_pass);
        }
    }
    return reports;
}

// Python's {:9.2e} and {:g}
const pad = (text) => text.replace(/e([+-])(\d)$/, "e$10$2");
const scientific = (x) => (x === Infinity ? "inf" : pad(x.toExponential(2)));
const general = (x) => (x < 1e-4 ? pad(x.toExponential()) : String(x));

// The first step outside the contract, or null.
export const firstBad = (reports) => reports.find((r) => !r.ok && !r.missing) ?? null;

// The closing line of `golden diff`.
export function verdict(reports) {
    const judged = reports.filter((r) => !r.missing);
    const bad = judged.filter((r) => !r.ok);
    let text = `all ${judged.length} steps within the contract`;
    if (!judged.some((r) => r.name !== "tokens")) text = "nothing to judge";
    else if (bad.length)
        text = `${bad.length} of ${judged.length} steps outside the contract, the first at ${bad[0].name}`;
    else if (judged.length < reports.length)
        text = `${judged.length} of ${reports.length} steps are there, all within the contract`;
    const values = judged.filter((r) => !r.name.endsWith(".q"));
    if (values.length) {
        const worst = values.reduce((most, r) => (r.error > most.error ? r : most));
        text += `; largest error ${scientific(worst.error)} at ${worst.name}`;
    }
    const flips = judged.filter((r) => r.name.endsWith(".q") && r.error > 0 && r.error < 1).length;
    if (flips) text += `; ${flips} steps have codes that rounded the other way`;
    return text;
}

export { scientific, shortName };
