// Choosing a model, and the line that says what goes on.

import { textOfTokens } from "./context.js";
import { h } from "./dom.js";
import { data } from "./runner.js";
import { state } from "./state.js";

// Radio buttons of some models. names: of `models`; onChange(name).
export function modelChoice(legend, group, names, chosen, onChange, models = data.models) {
    const about = h("p", { class: "about" }, models[chosen].text);
    const field = h(
        "fieldset",
        { class: "choice" },
        h("legend", {}, legend),
        h(
            "div",
            { class: "pills" },
            names.map((name) =>
                h(
                    "label",
                    { class: "pill" },
                    h("input", {
                        type: "radio",
                        name: group,
                        value: name,
                        checked: name === chosen,
                        onchange: () => {
                            about.textContent = models[name].text;
                            onChange?.(name);
                        },
                    }),
                    h("span", {}, models[name].title, h("small", {}, models[name].brief)),
                ),
            ),
        ),
        about,
    );
    field.choose = (name) => {
        field.querySelector(`[value=${name}]`).checked = true;
        about.textContent = models[name].text;
    };
    return field;
}

// The field for a prompt: {field, input}. It counts characters when it is nearly full, and those that do not fit.
const MOST = 300;
export function promptField(id) {
    const count = h("span", { id: `${id}-count`, role: "status" });
    let more = 0; // characters of a text being pasted that do not fit
    const input = h("input", {
        id,
        type: "text",
        value: state.prompt,
        maxlength: String(MOST),
        autocomplete: "off",
        spellcheck: "false",
        onpaste: (event) => {
            const kept = input.value.length - (input.selectionEnd - input.selectionStart);
            more = kept + event.clipboardData.getData("text").length - MOST;
        },
        oninput: () => {
            const n = input.value.length;
            state.prompt = input.value;
            count.textContent =
                more > 0 ? `: the last ${more} do not fit` : n > MOST - 50 ? `: ${n} of ${MOST} characters` : "";
            more = 0;
        },
    });
    const field = h("div", { class: "field grow" }, h("label", { for: id }, "A beginning", count), input);
    return { field, input };
}

// Controls that fold to one line, so that what they are about stands on the first screen. told(): what that line says
// of what is chosen. say(): says it anew; fold(): folds them as well.
export function folding(told, ...controls) {
    const said = h("span", {}, told());
    const line = h("summary", {}, said, h("span", { class: "change" }, "Change"));
    const box = h("details", { class: "fold" }, line, controls);
    box.say = () => (said.textContent = told());
    box.fold = () => {
        box.say();
        const isInside = box.contains(document.activeElement);
        box.open = false;
        if (isInside) line.focus();
    };
    return box;
}

// A place for a file of the visitor's own: chosen by a button, or dropped anywhere on the page (main.js). take(file)
// gets it. what: "a trace file".
export function filePlace(id, accept, what, take) {
    const input = h("input", {
        type: "file",
        id,
        accept,
        class: "quiet",
        onchange: () => {
            if (input.files[0]) take(input.files[0]);
            input.value = ""; // so that the same file can be chosen again
        },
    });
    const place = h(
        "div",
        { class: "drop" },
        h("p", {}, `Drop ${what} here, or`),
        h("label", { class: "pick" }, "Choose a file", input),
    );
    place.take = take;
    return place;
}

// A line that says what goes on, and what went wrong.
export function statusLine() {
    const line = h("p", { class: "status", role: "status" });
    line.busy = (text) => {
        line.className = "status busy";
        line.textContent = text;
    };
    line.failed = (text) => {
        line.className = "status failed";
        line.textContent = text;
    };
    line.done = (text = "") => {
        line.className = "status";
        line.textContent = text;
    };
    return line;
}

// Runs `work` with a button disabled; a failure becomes the status line. work(isLast) gives what the line says. Of works of
// a button that overlap the last one counts: before it shows anything, one asks isLast().
const lastOf = new WeakMap(); // button -> its last work
export async function working(button, status, text, work) {
    lastOf.set(button, work);
    const isLast = () => lastOf.get(button) === work;
    button.disabled = true;
    status.busy(text);
    try {
        const said = await work(isLast);
        if (isLast()) status.done(said ?? "");
    } catch (error) {
        if (isLast()) status.failed(error.message);
    } finally {
        if (isLast()) button.disabled = false;
    }
}

// Where two texts part that have so many tokens in common.
export const partedAfter = (same) =>
    same === 0 ? "They part at the first token." : `After ${same} equal token${same === 1 ? "" : "s"} they part.`;

export const words = (ids, vocabulary) => textOfTokens(ids.map((id) => vocabulary[id] ?? ""));
