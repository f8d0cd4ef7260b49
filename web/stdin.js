// The page's side of a program's standard input: text that a worker waits for.
//
//     const input = openInput();
//     worker.postMessage({type: "run", id, program: "runq", args: ["chat.bin", "-m", "chat"], files, wants: [],
//                         input: input.buffer});
//     input.send("What is the capital of France?\n");
//     input.close();                    // end of input, as Ctrl-D
//
// The worker cannot get messages while a program runs, so the text goes through memory that both share: a ring of
// bytes, behind four int32.
//
//     [0]  bytes that were written, in all (modulo 2^32)
//     [1]  bytes that were read, in all
//     [2]  1 once there will be no more
//     [3]  goes up with every change: what the reader sleeps on (Atomics.wait)
//
// Needs SharedArrayBuffer: a page has it if it came with Cross-Origin-Opener-Policy: same-origin and
// Cross-Origin-Embedder-Policy: require-corp.

const HEAD = 16; // bytes of the four int32
const WRITTEN = 0, READ = 1, CLOSED = 2, CHANGES = 3;

/** Whether this page may have a standard input at all. */
export function canOpenInput() {
    return typeof SharedArrayBuffer !== "undefined" && globalThis.crossOriginIsolated !== false;
}

/**
 * A new standard input with room for `capacity` bytes, a power of two, that the program has not read yet.
 * buffer: what the message "run" takes as `input`. send(text): UTF-8, a line with its "\n"; throws a RangeError, and
 * sends nothing, if there is no room. close(): no more. Both can be called before the program runs and while it does.
 */
export function openInput(capacity = 65536) {
    const buffer = new SharedArrayBuffer(HEAD + capacity);
    const state = new Int32Array(buffer, 0, HEAD / 4), ring = new Uint8Array(buffer, HEAD);
    const changed = () => {
        Atomics.add(state, CHANGES, 1);
        Atomics.notify(state, CHANGES);
    };
    return {
        buffer,
        send(text) {
            const bytes = new TextEncoder().encode(text);
            const written = Atomics.load(state, WRITTEN) >>> 0, read = Atomics.load(state, READ) >>> 0;
            const used = (written - read) >>> 0;
            if (used + bytes.length > capacity) throw new RangeError(`standard input has room for ${capacity - used} bytes`);
            bytes.forEach((byte, i) => { ring[(written + i) % capacity] = byte; });
            Atomics.store(state, WRITTEN, (written + bytes.length) | 0);
            changed();
        },
        close() {
            Atomics.store(state, CLOSED, 1);
            changed();
        },
    };
}

/**
 * The worker's side: read(to) fills the Uint8Array `to` with what is there, waits if there is nothing yet, and
 * returns how many bytes it got: 0 at the end. It calls waiting() before it waits.
 */
export function readerOf(buffer, waiting) {
    const state = new Int32Array(buffer, 0, HEAD / 4), ring = new Uint8Array(buffer, HEAD);
    return (to) => {
        if (to.length === 0) return 0; // C's library asks for none at first: nothing to wait for
        for (;;) {
            const changes = Atomics.load(state, CHANGES);
            const written = Atomics.load(state, WRITTEN) >>> 0, read = Atomics.load(state, READ) >>> 0;
            const n = Math.min((written - read) >>> 0, to.length);
            for (let i = 0; i < n; i++) to[i] = ring[(read + i) % ring.length];
            if (n > 0) {
                Atomics.store(state, READ, (read + n) | 0);
                return n;
            }
            if (Atomics.load(state, CLOSED)) return 0;
            waiting();
            Atomics.wait(state, CHANGES, changes);
        }
    };
}
