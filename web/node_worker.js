// worker.js as a worker_thread of node: what a browser's worker has and node's has not.
//
//     const worker = new Worker(new URL("node_worker.js", import.meta.url));      // of node:worker_threads
//     worker.on("message", (message) => ...);
//     worker.postMessage({type: "run", ...});                                     // as in worker.js
//
// URLs may be file: URLs.

import { webcrypto } from "node:crypto";
import { readFile } from "node:fs/promises";
import { parentPort } from "node:worker_threads";

const fetchOfNode = globalThis.fetch;

globalThis.self = globalThis;
globalThis.crypto ??= webcrypto; // node has it from 20 on
globalThis.location = new URL(import.meta.url);
globalThis.postMessage = (message, transfer) => parentPort.postMessage(message, transfer);
globalThis.fetch = async (url) => {
    if (!String(url).startsWith("file:")) return fetchOfNode(url);
    const headers = String(url).endsWith(".wasm") ? { "Content-Type": "application/wasm" } : {};
    return new Response(await readFile(new URL(url)), { headers });
};

await import("./worker.js");
parentPort.on("message", (data) => globalThis.onmessage({ data }));
