// A Web Worker that runs the programs: it gives them arguments and files, and hands on what they print and write. It
// knows nothing of models.
//
//     const worker = new Worker("worker.js", {type: "module"});
//
//     page -> worker   {type: "run", id, program, args, files, wants, input}
//         id        any value; comes back in each message of this run
//         program   "runq", "runq_w8a8", "runq_gptq", "runq_moe", or "variants/NAME": NAME.js and NAME.wasm beside
//                   this file
//         args      strings, without the program's name
//         files     {"/model.bin": ArrayBuffer, or File, or Blob, or the URL of one}
//         wants     paths of files that the program writes and that shall come back, such as "/trace.safetensors";
//                   the program runs in the folder "/"
//         input     null, or the `buffer` of openInput() in stdin.js: what the program reads from standard input
//     worker -> page   {type: "stdout", id, text}    as it is printed; whole characters
//                      {type: "stderr", id, text}
//                      {type: "waiting", id}          there is nothing on standard input: in a chat, it is the page's turn
//                      {type: "done", id, code, files, seconds}
//         code      the program's exit code; 134 (as a shell has it for SIGABRT) where it did not get to one
//         files     {path: ArrayBuffer} of those in `wants` that are there
//         seconds   that main() took
//
// Runs go one after the other, each in a new instance with memory of its own. Compiled modules are kept. To stop a
// run, terminate() the worker.
//
// A model file is copied once, into the memory of the program that maps it, a part at a time; a File is never read as
// a whole. (With --mmap the program makes no packed copy either.)
//
// The same file runs in node: node_worker.js gives it what a browser's worker has.

import { readerOf } from "./stdin.js";

const PART = 1 << 22; // bytes of a File that are read at once
const ABORTED = 134;
const EINVAL = 28, ENODEV = 43, ENOMEM = 48; // Emscripten's errno

const programs = new Map(); // name -> promise of {create, module}

function load(name) {
    if (!programs.has(name)) {
        const loaded = Promise.all([
            import(new URL(`${name}.js`, import.meta.url)),
            compile(new URL(`${name}.wasm`, import.meta.url)),
        ]).then(([{ default: create }, module]) => ({ create, module }));
        loaded.catch(() => programs.delete(name)); // may be there next time
        programs.set(name, loaded);
    }
    return programs.get(name);
}

async function compile(url) {
    const response = await fetched(url);
    // Some servers do not know the type, without which a stream is refused.
    if (response.headers.get("Content-Type") === "application/wasm") return WebAssembly.compileStreaming(response);
    return WebAssembly.compile(await response.arrayBuffer());
}

async function fetched(url) {
    const response = await fetch(url);
    if (!response.ok) throw new Error(`${url}: ${response.status} ${response.statusText}`);
    return response;
}

// What a program sees as a file: its size, and copy(to, from), which fills `to` with the bytes from `from` on.
async function openSource(content) {
    if (typeof content === "string") content = await (await fetched(content)).arrayBuffer();
    if (content instanceof Blob) {
        const reader = new FileReaderSync();
        return {
            size: content.size,
            copy(to, from) {
                for (let done = 0; done < to.length; done += PART) {
                    const end = Math.min(done + PART, to.length);
                    const part = reader.readAsArrayBuffer(content.slice(from + done, from + end));
                    to.set(new Uint8Array(part), done);
                }
            },
        };
    }
    const bytes = new Uint8Array(content);
    return { size: bytes.length, copy: (to, from) => to.set(bytes.subarray(from, from + to.length)) };
}

// The folder in which a file will be.
function addFolder({ FS }, path) {
    const folder = path.slice(0, path.lastIndexOf("/"));
    if (folder) FS.mkdirTree(folder);
}

// Puts a source into the program's file system, read only. mmap() copies it straight into memory.
function addFile(program, path, source) {
    const { FS } = program;
    addFolder(program, path);
    const node = FS.create(path, 0o444);
    node.usedBytes = source.size;
    const seek = node.stream_ops.llseek;
    node.stream_ops = {
        llseek: seek,
        read(_stream, heap, offset, length, position) {
            const n = Math.max(0, Math.min(length, source.size - position));
            source.copy(new Uint8Array(heap.buffer, heap.byteOffset + offset, n), position);
            return n;
        },
        mmap(_stream, address, length, position) {
            if (address !== 0) throw new FS.ErrnoError(EINVAL);
            if (position + length > source.size) throw new FS.ErrnoError(ENODEV);
            const ptr = program._memalign(65536, length) >>> 0;
            if (ptr === 0) throw new FS.ErrnoError(ENOMEM);
            source.copy(new Uint8Array(program.memory(), ptr, length), position);
            return { ptr, allocated: true };
        },
    };
}

// Standard input from a reader as in stdin.js, or at its end; standard output and error to write(bytes).
function setStreams(program, read, writes) {
    const { FS } = program;
    FS.init(() => null, () => {}, () => {});
    FS.streams[0].stream_ops = {
        read: (_stream, heap, offset, length) => read(new Uint8Array(heap.buffer, heap.byteOffset + offset, length)),
    };
    writes.forEach((write, i) => {
        FS.streams[i + 1].stream_ops = {
            write(_stream, heap, offset, length) {
                write(heap.subarray(offset, offset + length));
                return length;
            },
        };
    });
}

// Bytes -> text messages: a character that is cut in two waits for its rest.
function decoded(type, id) {
    const decoder = new TextDecoder();
    const post = (text) => { if (text) self.postMessage({ type, id, text }); };
    return {
        write: (bytes) => post(decoder.decode(bytes.slice(), { stream: true })),
        end: () => post(decoder.decode()),
    };
}

async function run({ id, program: name, args, files, wants, input }) {
    const out = decoded("stdout", id), err = decoded("stderr", id);
    const done = { type: "done", id, code: ABORTED, files: {}, seconds: 0 };
    const started = performance.now();
    let start = started;
    try {
        const { create, module } = await load(name);
        const sources = new Map();
        for (const [path, content] of Object.entries(files ?? {})) sources.set(path, await openSource(content));
        let memory = null;
        const program = await create({
            thisProgram: name,
            instantiateWasm(imports, receive) {
                const instance = new WebAssembly.Instance(module, imports);
                memory = Object.values(instance.exports).find((e) => e instanceof WebAssembly.Memory);
                receive(instance, module);
                return instance.exports;
            },
            preRun: [(p) => {
                p.memory = () => memory.buffer;
                setStreams(p, input ? readerOf(input, () => self.postMessage({ type: "waiting", id })) : () => 0, [out.write, err.write]);
                for (const [path, source] of sources) addFile(p, path, source);
                for (const path of wants ?? []) addFolder(p, path);
            }],
        });
        start = performance.now();
        done.code = program.callMain([...args]);
        for (const path of wants ?? []) {
            if (program.FS.analyzePath(path).exists) done.files[path] = program.FS.readFile(path).slice().buffer;
        }
    } catch (error) {
        err.write(new TextEncoder().encode(`${name}: ${error}\n`));
    }
    done.seconds = (performance.now() - start) / 1000;
    out.end();
    err.end();
    self.postMessage(done, Object.values(done.files));
}

let last = Promise.resolve();
self.onmessage = ({ data }) => {
    if (data.type === "run") last = last.then(() => run(data));
};
