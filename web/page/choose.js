// Choosing a model, and the line that says what goes on.

import { h } from "./dom.js";
import { data } from "./runner.js";

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

// Runs `work` with a button disabled; a failure becomes the status line.
export async function working(button, status, text, work) {
    button.disabled = true;
    status.busy(text);
    try {
        const said = await work();
        status.done(said ?? "");
    } catch (error) {
        status.failed(error.message);
    } finally {
        button.disabled = false;
    }
}

export const words = (ids, vocabulary) => ids.map((id) => vocabulary[id] ?? "").join("");
