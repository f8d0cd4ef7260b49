// A program in WebAssembly, on node, as on a command line: node build/web/run.js runq model.bin -i "Once upon a time"
//
// Arguments that are files here are given to the program, and so is standard input, if it is no terminal. What
// `--trace FILE` writes is written here. The exit code is the program's.

import { readFileSync, statSync, writeFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { Worker } from "node:worker_threads";

import { openInput } from "./stdin.js";

const [program, ...args] = process.argv.slice(2);
if (program === undefined) {
    console.error("usage: node run.js PROGRAM ARGUMENTS...");
    process.exit(2);
}

function isFile(path) {
    try {
        return statSync(path).isFile();
    } catch {
        return false; // there is none, or the argument is too long for a path
    }
}

const files = {};
for (const arg of args) {
    if (isFile(arg)) files[resolve("/", arg)] = pathToFileURL(arg).href;
}
// What is written: its path in the program, where the working folder is "/", and here.
const traces = new Map(args.filter((_, i) => args[i - 1] === "--trace").map((path) => [resolve("/", path), path]));

let input = null;
if (!process.stdin.isTTY) {
    const text = readFileSync(0, "utf8");
    input = openInput(1 << 20);
    input.send(text);
    input.close();
}

const worker = new Worker(new URL("node_worker.js", import.meta.url));
worker.on("message", (message) => {
    if (message.type === "stdout") process.stdout.write(message.text);
    if (message.type === "stderr") process.stderr.write(message.text);
    if (message.type !== "done") return;
    for (const [path, bytes] of Object.entries(message.files)) writeFileSync(traces.get(path), new Uint8Array(bytes));
    process.exitCode = message.code;
    worker.terminate();
});
worker.postMessage({ type: "run", id: 0, program, args, files, wants: [...traces.keys()], input: input?.buffer ?? null });
