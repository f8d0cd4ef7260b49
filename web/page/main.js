// The page: its views, what a browser lacks, what has been transferred.

import { byId } from "./dom.js";
import { workerBytes } from "./runner.js";
import { showStop, tourStart } from "./tour.js";
import { arrive, arrived, placeOf } from "./url.js";
import { startWalk, visitWalk } from "./walk.js";

// A view's start() builds it; its visit(of), where it has one, shows the place that the address names.
const views = {
    walk: async () => ({ start: startWalk, visit: visitWalk }),
    compare: async () => {
        const { startCompare, visitCompare } = await import("./compare.js");
        return { start: startCompare, visit: visitCompare };
    },
    break: async () => {
        const { startBreak, visitBreak } = await import("./break.js");
        return { start: startBreak, visit: visitBreak };
    },
    port: async () => ({ start: (await import("./port.js")).startPort }),
    chat: async () => ({ start: (await import("./chat.js")).startChat }),
};
const started = new Set();
let shown = "";

async function show() {
    const { view, of } = placeOf(location.hash);
    if (view === "tour") return location.replace(tourStart(of));
    const name = view in views ? view : "walk";
    const arrival = arrive(name, of);
    if (of.size) showStop(/^([1-9]|10)$/.test(of.get("tour")) ? Number(of.get("tour")) : 0);
    for (const view of Object.keys(views)) byId(view).hidden = view !== name;
    for (const link of byId("tabs").querySelectorAll("a")) {
        if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
        else link.removeAttribute("aria-current");
    }
    const { start, visit } = await views[name]();
    if (!started.has(name)) {
        started.add(name);
        start();
    }
    if (shown !== name) scrollTo(0, 0);
    shown = name;
    await visit?.(of);
    arrived(arrival);
}

// A function whose body is one SIMD instruction (i8x16.splat, i8x16.extract_lane_s): whether it may be compiled.
const SIMD = new Uint8Array([
    0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 8, 1, 6, 0, 65, 0, 253, 15, 11,
]);

export function lacks() {
    const missing = [];
    if (typeof WebAssembly !== "object") missing.push("WebAssembly, without which no program runs here");
    else if (!WebAssembly.validate(SIMD))
        missing.push("WebAssembly's SIMD instructions, without which no program runs here");
    if (typeof DecompressionStream !== "function") missing.push("DecompressionStream, with which models are unpacked");
    return missing;
}

const missing = lacks();
if (missing.length) {
    byId("lacks").hidden = false;
    byId("lacks").textContent = `This browser lacks ${missing.join("; and ")}.`;
}

function transferred() {
    const entries = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")];
    const bytes = entries.reduce((sum, entry) => sum + (entry.encodedBodySize || 0), workerBytes);
    byId("transferred").textContent =
        `${(bytes / 1e6).toFixed(1)} MB fetched so far; a model is fetched when it is first chosen.`;
}
setInterval(transferred, 2000);
transferred();

// A file that is dropped goes to the view that takes one; no browser opens it in the page's place.
const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
const place = () => document.querySelector("main > section:not([hidden]) .drop");
addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    place()?.classList.add("over");
});
addEventListener("dragleave", () => place()?.classList.remove("over"));
addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    place()?.classList.remove("over");
    const [file, ...others] = event.dataTransfer.files;
    const left = place() ? others : [file, ...others];
    byId("said").textContent = left.length
        ? `Not taken: ${left.map((f) => f.name).join(", ")}. Check takes one trace file, Chat one model file.`
        : "";
    if (file) place()?.take(file);
});

addEventListener("hashchange", () => (byId("said").textContent = ""));
addEventListener("hashchange", show);
await show();
document.documentElement.dataset.ready = "yes";
