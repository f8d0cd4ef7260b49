// The programs, in a worker. One runs at a time; a second waits.

import { Weights } from "./weights.js";

export const data = await (await fetch("data.json")).json();

let worker = null;
let next = 1;
const waiting = new Map();

function theWorker() {
    if (worker) return worker;
    worker = new Worker("worker.js", { type: "module" });
    worker.onmessage = ({ data: message }) => {
        const run = waiting.get(message.id);
        if (!run) return;
        if (message.type === "done") {
            waiting.delete(message.id);
            run.done({ ...message, stdout: run.stdout, stderr: run.stderr });
        } else {
            if (message.text) run[message.type] += message.text;
            run.heard?.(message.type, message.text);
        }
    };
    worker.onerror = (event) => {
        for (const [id, run] of waiting)
            run.done({
                id,
                code: 1,
                files: {},
                seconds: 0,
                stdout: run.stdout,
                stderr: `${run.stderr}${event.message}\n`,
            });
        waiting.clear();
    };
    return worker;
}

// Bytes of the files that the worker has fetched: the page does not see its requests.
export let workerBytes = 0;
const known = new Set();
async function countProgram(program) {
    if (known.has(program)) return;
    known.add(program);
    for (const file of [`${program}.wasm`, `${program}.js`]) {
        const answer = await fetch(file, { method: "HEAD" });
        if (answer.ok) workerBytes += Number(answer.headers.get("Content-Length") ?? 0);
    }
}

// Ends what runs; the next run starts a new worker.
export function stopAll() {
    worker?.terminate();
    worker = null;
    for (const [id, run] of waiting)
        run.done({ id, code: 130, files: {}, seconds: 0, stdout: run.stdout, stderr: run.stderr });
    waiting.clear();
}

// Runs a program: {code, files, seconds, stdout, stderr}. heard(stream, text) hears output as it comes, and "waiting" when
// the program waits for a line of its input.
export function run({ program, args, files, wants = [], input = null, heard = null }) {
    const id = next++;
    countProgram(program).catch(() => {});
    return new Promise((done) => {
        waiting.set(id, { done, heard, stdout: "", stderr: "" });
        theWorker().postMessage({ type: "run", id, program, args, files, wants, input });
    });
}

const models = new Map();

// Bytes of a model file, fetched once, when first asked for.
export function modelBytes(name) {
    const fetched = models.get(name) ?? unpacked(data.models[name].file);
    models.set(name, fetched);
    return fetched;
}

// The bytes of a gzip file. Some servers take such files for an encoding, and the browser has unpacked them then.
async function unpacked(url) {
    const answer = await fetch(url);
    if (!answer.ok) throw new Error(`${url}: ${answer.status} ${answer.statusText}`);
    const bytes = await answer.arrayBuffer();
    const [a, b] = new Uint8Array(bytes, 0, 2);
    if (a !== 0x1f || b !== 0x8b) return bytes;
    return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

// Bytes of a model file in which one matrix has codes of fewer bits (matrices_in_bits of web/page_data.py).
export async function bytesInBits(matrix, bits) {
    const { model, all } = data.bits;
    const bytes = await modelBytes(model);
    if (!all.includes(bits)) return bytes;
    const fetched = inBits.get(matrix) ?? unpacked(`bits/${matrix}.gz`);
    inBits.set(matrix, fetched);
    const parts = new Uint8Array(await fetched);
    const changed = new Uint8Array(bytes.slice(0));
    let from = (all.indexOf(bits) * parts.length) / all.length;
    for (const part of ["codes", "scales"]) {
        const [dtype, shape, offset] = data.models[model].tensors[`${matrix}.${part}`];
        const size = shape.reduce((n, m) => n * m, dtype === "|i1" ? 1 : 4);
        changed.set(parts.subarray(from, from + size), offset);
        from += size;
    }
    return changed.buffer;
}
const inBits = new Map();

export async function weightsOf(name) {
    return new Weights(data.models[name], await modelBytes(name));
}

// A run failed: its last line is the program's own.
export class ProgramError extends Error {}

export function lastLine(result) {
    return result.stderr.trim().split("\n").at(-1) || `the program ended with code ${result.code}`;
}

// Runs a model on a text, or on ids, and returns the trace's bytes and what was printed. name: of a model; program: another one for it.
export async function traceRun(name, { prompt, ids, newTokens, program, bytes, extra = [] }) {
    const model = data.models[name];
    const start = ids ? ["--ids", Array.from(ids).join(",")] : ["-i", prompt];
    const args = [
        "/model.bin",
        ...start,
        "-n",
        String(newTokens),
        "-t",
        "0",
        ...extra,
        "--digest",
        "--trace",
        "/trace.safetensors",
    ];
    const files = { "/model.bin": bytes ?? (await modelBytes(name)) };
    const result = await run({ program: program ?? model.program, args, files, wants: ["/trace.safetensors"] });
    const trace = result.files["/trace.safetensors"];
    if (result.code !== 0 || !trace) throw new ProgramError(lastLine(result));
    const prefill = /prefill\s+(\d+) tokens/.exec(result.stderr);
    const digest = /digest\s+([0-9a-f]{16})/.exec(result.stderr);
    return { ...result, trace, nPrompt: prefill ? Number(prefill[1]) : null, digest: digest?.[1] ?? "" };
}
