// Traces: the safetensors files that a program writes with --trace, and the names of their steps.
// Format: https://huggingface.co/docs/safetensors (8-byte length, JSON header, raw little-endian data).

import { halfToNumber } from "./numbers.js";

// numpy's names, as `golden diff` prints them, how values are read, and how they become numbers of JavaScript.
const TYPES = {
    F64: ["float64", 8, (b) => new Float64Array(b)],
    F32: ["float32", 4, (b) => new Float32Array(b)],
    F16: ["float16", 2, (b) => new Int16Array(b), (bits) => Float32Array.from(bits, halfToNumber)],
    BF16: [
        "bfloat16",
        2,
        (b) => new Int16Array(b),
        (bits) => new Float32Array(Int32Array.from(bits, (v) => v << 16).buffer),
    ],
    I64: ["int64", 8, (b) => new BigInt64Array(b), (big) => Float64Array.from(big, Number)],
    I32: ["int32", 4, (b) => new Int32Array(b)],
    I16: ["int16", 2, (b) => new Int16Array(b)],
    I8: ["int8", 1, (b) => new Int8Array(b)],
    U64: ["uint64", 8, (b) => new BigUint64Array(b), (big) => Float64Array.from(big, Number)],
    U32: ["uint32", 4, (b) => new Uint32Array(b)],
    U16: ["uint16", 2, (b) => new Uint16Array(b)],
    U8: ["uint8", 1, (b) => new Uint8Array(b)],
};

export class Tensor {
    // exact: the values where numbers of JavaScript are not the same: 64-bit integers as BigInt, fp16 as its bits.
    constructor(type, shape, values, exact = values) {
        this.type = type;
        this.shape = shape;
        this.values = values;
        this.exact = exact;
    }
    get size() {
        return this.shape.reduce((n, m) => n * m, 1);
    }
    // Values of one token: all dimensions but the first.
    get perToken() {
        return this.shape.slice(1).reduce((n, m) => n * m, 1);
    }
    row(t) {
        return this.values.subarray(t * this.perToken, (t + 1) * this.perToken);
    }
    rows(chosen) {
        const n = this.perToken;
        const pick = (all) => {
            const found = new all.constructor(chosen.length * n);
            chosen.forEach((t, i) => found.set(all.subarray(t * n, (t + 1) * n), i * n));
            return found;
        };
        return new Tensor(this.type, [chosen.length, ...this.shape.slice(1)], pick(this.values), pick(this.exact));
    }
    // Whole numbers that differ where values do, be it in their last bit or in the sign of a zero.
    get bits() {
        return this.type === "float32" ? new Int32Array(this.exact.buffer) : this.exact;
    }
    get isWhole() {
        return /int/.test(this.type);
    }
}

// Whole numbers that JavaScript would round stay as they are written, as strings: for messages.
const STRING_OR_NUMBER = /"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?/g;
const keepDigits = (part) => (/^-?\d{16,}$/.test(part) ? `"${part}"` : part);

// {name: Tensor} of a file's bytes. Throws with one line for what is no trace.
export function readTrace(buffer) {
    if (buffer.byteLength < 8) throw new Error(`not a safetensors file: ${buffer.byteLength} bytes`);
    const view = new DataView(buffer);
    const length = Number(view.getBigUint64(0, true));
    if (length > buffer.byteLength - 8)
        throw new Error(`not a safetensors file: its header would have ${view.getBigUint64(0, true)} bytes`);
    let header;
    try {
        const text = new TextDecoder("utf-8", { fatal: true }).decode(new Uint8Array(buffer, 8, length));
        header = JSON.parse(text.replace(STRING_OR_NUMBER, keepDigits));
    } catch {
        throw new Error("not a safetensors file: its header is not JSON");
    }
    const tensors = {};
    for (const [name, entry] of Object.entries(header)) {
        if (name === "__metadata__") continue;
        const { dtype, shape, data_offsets: range } = entry;
        if (!(dtype in TYPES))
            throw new Error(`tensor ${name} has type ${dtype}, expected one of ${Object.keys(TYPES).join(", ")}`);
        const [type, size, read, widen = (values) => values] = TYPES[dtype];
        const n = Array.isArray(shape) ? shape.reduce((a, b) => a * b, 1) : NaN;
        const [begin, end] = Array.isArray(range) ? range.map((at) => Number(at) + 8 + length) : [];
        if (!(end - begin === n * size) || begin < 8 + length || end > buffer.byteLength)
            throw new Error(`tensor ${name} does not fit: shape [${shape}], bytes [${range}]`);
        const exact = read(buffer.slice(begin, end));
        tensors[name] = new Tensor(type, shape, widen(exact), exact);
    }
    return tensors;
}

export const shortName = (name) => name.replace(/^layers\.\d+\./, "");
export const layerOf = (name) => (/^layers\.(\d{1,5})\./.test(name) ? Number(name.split(".")[1]) : -1);

// The key by which golden/trace.py sorts: layer, step, part of the step.
export function stepOrder(name, order) {
    let base = name;
    let part = 1;
    for (const [suffix, place] of [
        [".acc", 0],
        [".q", 3],
        [".s", 4],
    ]) {
        if (base.endsWith(suffix) && base === name) [base, part] = [base.slice(0, -suffix.length), place];
    }
    if (base.endsWith(".gathered")) [base, part] = [base.slice(0, -".gathered".length), Math.max(part, 2)];
    const found = /^layers\.(\d{1,5})\.([\s\S]+)$/.exec(base);
    if (found) {
        const at = order.indexOf(found[2]);
        return [2 + Number(found[1]), at < 0 ? order.length : at, part];
    }
    const last = 2 ** 30; // behind the layers, which are 2, 3, ...
    const outside = { tokens: -2, positions: -1, embed: 0, rotate: 1 };
    Object.assign(outside, { rotate_back: last, norm: last + 1, logits: last + 2 });
    return [Object.hasOwn(outside, base) ? outside[base] : 2 ** 31, 0, part];
}

export function sortedSteps(names, order) {
    const keys = new Map(names.map((name) => [name, stepOrder(name, order)]));
    const compare = (a, b) => {
        const [x, y] = [keys.get(a), keys.get(b)];
        for (let i = 0; i < 3; i++) if (x[i] !== y[i]) return x[i] - y[i];
        return a < b ? -1 : a > b ? 1 : 0;
    };
    return [...names].sort(compare);
}

// What a visitor walks through: scales belong to their codes, accumulators to their product.
export function walkSteps(trace, order) {
    const names = Object.keys(trace).filter((name) => !/\.(s|acc)$/.test(name) && name !== "positions");
    return sortedSteps(names, order);
}
