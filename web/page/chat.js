// The fifth view: a model file of the visitor's own, and a conversation with it.

import { byId, h } from "./dom.js";
import { filePlace, statusLine } from "./choose.js";
import { short } from "./numbers.js";
import { data, lastLine, run, stopAll } from "./runner.js";
import { canOpenInput, openInput } from "./stdin.js";

let talk = null; // the running conversation: {input, ended}

// Shared memory needs two headers. Where the server does not send them, a service worker adds them (isolate.js) once the
// page is loaded again.
async function isolate() {
    if (crossOriginIsolated) return sessionStorage.removeItem("isolating");
    if (!navigator.serviceWorker || sessionStorage.getItem("isolating")) return;
    sessionStorage.setItem("isolating", "yes"); // once: where it does not help, it will not the second time
    await navigator.serviceWorker.register("isolate.js");
    await navigator.serviceWorker.ready;
    location.reload();
}

export function startChat() {
    isolate().catch(() => {}); // conversation() says what to do
    const status = statusLine();
    const view = h("div", { id: "chat-view" });
    byId("chat").append(
        h("h2", { id: "chat-title", class: "quiet" }, "Chat with a model of your own"),
        h(
            "p",
            { class: "intro" },
            "Choose a model file of this repository: ",
            h("code", {}, "make smollm2"),
            ", in a copy of it, writes one that can talk, build/models/smollm2.q8.bin (SmolLM2-135M in Q8, 144 MB). ",
            location.pathname.includes("/run/")
                ? [h("a", { href: "../real-model.html" }, "The chapter about real models"), " says more. "]
                : "",
            "The file is read in parts and stays on your computer.",
        ),
        filePlace("chat-file", ".bin", "a model file", open),
        status,
        view,
    );

    async function open(file) {
        talk?.end();
        stopAll();
        talk = null;
        view.replaceChildren();
        status.busy(`${file.name} is looked at ...`);
        const program = await programOf(file);
        const info = await run({ program, args: [`/${file.name}`, "--info"], files: { [`/${file.name}`]: file } });
        if (info.code !== 0) return status.failed(lastLine(info));
        status.done();
        const facts = Object.fromEntries(
            info.stdout.split("\n").map((line) => [line.slice(0, 24).trim(), line.slice(24).trim()]),
        );
        const said = ["scheme", "arch", "n_layers", "dim", "vocab_size"]
            .filter((key) => facts[key])
            .map((key) => `${key} ${facts[key]}`)
            .join(", ");
        view.replaceChildren(
            h(
                "section",
                { class: "card" },
                h("h3", {}, file.name),
                h("p", {}, `${short(file.size / 1e6)} MB; ${said}`),
                h(
                    "details",
                    {},
                    h("summary", {}, "All that the program says of it"),
                    h("pre", { class: "printed", tabindex: "0" }, info.stdout),
                ),
                conversation(file, program, facts),
            ),
        );
        byId("chat-line")?.focus();
    }
}

// The program whose files begin like this one; runq says what is wrong with any other.
async function programOf(file) {
    const head = await file.slice(0, 4).arrayBuffer();
    const magic = head.byteLength === 4 ? new DataView(head).getUint32(0, true) : 0;
    return data.magics[magic] ?? "runq";
}

function conversation(file, program, facts) {
    if (!canOpenInput())
        return h(
            "p",
            { class: "note" },
            "A chat needs memory that page and program share. Browsers give it to a page that came by https, or from this very computer (http://127.0.0.1, as make web-serve does), and not in a private window. All other views work without it.",
        );
    if (facts.chat_template !== "yes")
        return h("p", { class: "note" }, "The file has no chat template: there is nothing to talk to.");
    const list = h("div", { class: "talk", id: "talk", role: "log", "aria-label": "conversation", tabindex: "0" });
    const line = h("input", {
        type: "text",
        id: "chat-line",
        autocomplete: "off",
        placeholder: "What is the capital of France?",
        "aria-label": "your message",
    });
    const send = h("button", { type: "submit", class: "primary" }, "Send");
    const end = h("button", { type: "button", onclick: () => talk?.end() }, "End");
    const calm = h("input", { type: "checkbox", checked: true, id: "chat-calm" });
    const rate = h("p", { class: "note", id: "chat-rate", role: "status" });
    const form = h(
        "form",
        { class: "controls" },
        h("div", { class: "field grow" }, line),
        send,
        end,
        h("label", { class: "note" }, calm, " always the most probable token"),
        rate,
    );
    const options = () => [
        ...["-c", String(Math.min(1024, Number(facts.max_seq_len)))],
        ...(calm.checked ? ["-t", "0"] : []),
    ];
    form.addEventListener("submit", (event) => {
        event.preventDefault();
        const text = line.value.trim();
        if (!text) return;
        line.value = "";
        talk ??= begin(file, program, options(), list, rate, send);
        calm.disabled = true;
        talk.say(text);
    });
    return [list, form];
}

// Starts the program; its standard input is memory that both sides share.
function begin(file, program, options, list, rate, send) {
    const input = openInput();
    let answer = null;
    let pieces = 0;
    let first = 0;
    const heard = (stream, text) => {
        if (stream === "waiting" && answer) {
            answer.textContent = answer.textContent.trimEnd();
            send.disabled = false;
        }
        if (stream !== "stdout" || !answer) return;
        pieces++; // a message is a token, but for those that end within a character
        if (pieces === 1) first = performance.now();
        answer.textContent += text;
        list.scrollTop = list.scrollHeight;
        const seconds = (performance.now() - first) / 1000;
        if (pieces > 4) rate.textContent = `about ${Math.round((pieces - 1) / seconds)} tokens/s`;
    };
    const args = [`/${file.name}`, "-m", "chat", ...options];
    run({ program, args, files: { [`/${file.name}`]: file }, input: input.buffer, heard }).then((result) => {
        send.disabled = false;
        talk = null;
        const decode = /decode.*/.exec(result.stderr);
        rate.textContent =
            result.code === 0
                ? `The conversation has ended. ${decode ? decode[0].replace(/\s+/g, " ") : ""}`
                : lastLine(result);
    });
    return {
        say(text) {
            send.disabled = true;
            pieces = 0;
            answer = h("p", { class: "it" });
            list.append(h("p", { class: "you" }, text), answer);
            list.scrollTop = list.scrollHeight;
            rate.textContent = "The model reads ...";
            input.send(`${text}\n`);
        },
        end: () => input.close(),
    };
}
