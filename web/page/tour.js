// The tour: ten places of the page in order, each with three sentences, something to do and a question. A stop is an
// address like any other, with `tour` and its number (url.js): #tour is the way to the first.

import { byId, guided, h } from "./dom.js";
import { data } from "./runner.js";
import { endTour } from "./url.js";

// at: the place; next: the place where `click` leads. In `text`, [[word]] is a word of the glossary.
export const STOPS = [
    {
        title: "A token becomes a vector",
        at: "walk?model=q8&token=4&step=embed&cell=0",
        text: "The text is cut into [[token]]s, and each has a number in the vocabulary. That number picks a row of a table: 128 numbers, with which the model computes from here on. In the file they are whole numbers, [[code]]s, and every 64 of them share a [[scale]].",
        click: "Look at another token, “Once”",
        next: "walk?model=q8&token=1&step=embed&cell=0",
        question: "A word stands twice in a text. Do its two vectors differ at this step?",
        answer: "No: the row depends on the token's number alone. Its place in the text comes in later, where queries and keys are rotated.",
    },
    {
        title: "A norm",
        at: "walk?model=q8&token=4&step=layers.0.attn.norm",
        text: "Layers add to the list of numbers, so it grows; what a layer reads must not. All its numbers are therefore divided by their typical size, the root of the mean of their squares, and multiplied by learned weights. This is computed in fp32: few numbers, and whole ones would be too coarse for it.",
        click: "See how one number came about",
        next: "walk?model=q8&token=4&step=layers.0.attn.norm&cell=5",
        question: "If all numbers of the stream were twice as large, what would change here?",
        answer: "Next to nothing: their typical size would be twice as large as well. (Not nothing, because of the small eps under the root.)",
    },
    {
        title: "Rounding to codes, and what is lost",
        at: "walk?model=q8&token=4&step=layers.0.attn.norm.q&cell=5",
        text: "Whole numbers are quicker to multiply and smaller to keep. So the largest of a [[group]] of 64 numbers becomes 127 or −127, the others whole numbers in the same measure, and the [[scale]] says what one step is worth. What is lost of each is at most half a step.",
        click: "See the same in W8A8, where all 128 share one scale",
        next: "walk?model=w8a8&token=4&step=layers.0.attn.norm.q&cell=5",
        question: "One number of a group is 200 times as large as all others. What becomes of those?",
        answer: "Their codes are −1, 0 or 1: the scale follows the largest. This is why groups are small, and why SmoothQuant makes large channels smaller beforehand.",
    },
    {
        title: "A product of whole numbers",
        at: "walk?model=q8&token=4&step=layers.0.attn.q_proj&cell=0",
        text: "Each number of the query is a row of a matrix times the token's numbers, code by code. Of each [[group]] 64 products are added up as whole numbers, exactly: that sum is its [[accumulator]]. Only then the two [[scale]]s, of the weights and of the token, make an fp32 number of it.",
        click: "Take the next number of the query",
        next: "walk?model=q8&token=4&step=layers.0.attn.q_proj&cell=1",
        question: "How many products of codes does the whole query take, and how many sums are scaled?",
        answer: "128 × 128 = 16,384 products; each of the 128 numbers has two groups, so 256 sums are scaled. Nearly all of the work is done in whole numbers.",
    },
    {
        title: "Heads, and what they look at",
        at: "walk?model=q8&token=12&step=layers.1.attn.probs",
        text: "Each of the four heads compares this token's query with the key of every token so far. Softmax makes shares of these scores: all positive, together 1. The darker a word is here, the more of its value this head takes over.",
        click: "Look at what another head sees",
        next: "walk?model=q8&token=12&step=layers.1.attn.probs&head=3",
        question: "Why is the upper half of each triangle empty?",
        answer: "A token sees only itself and those before it. Those behind it are what the model has yet to find.",
    },
    {
        title: "The KV cache fills up",
        at: "walk?model=q8&new=64&token=4&step=layers.1.attn.scores&map=1",
        text: "Keys and values of all tokens so far are kept: green on the map, at “Compare” and “Mix” of every layer. With each token they grow by a line, and nothing of the old ones is computed again. For long texts they take more memory than the weights.",
        click: "Go to the last token, and watch the green boxes",
        next: "walk?model=q8&new=64&token=67&step=layers.1.attn.scores&map=1",
        question: "How many numbers does this model keep for each token?",
        answer: "512: in each of 4 layers 64 of its key and 64 of its value.",
    },
    {
        title: "Feed-forward",
        at: "walk?model=q8&token=4&step=layers.1.ffn.swiglu&cell=0",
        text: "After attention each token is on its own again. Two matrices make 384 numbers each of its 128: a gate and what goes through it, and the two are multiplied. A third matrix brings the list back to 128, which are added to the residual stream.",
        click: "See the way back, “Down”",
        next: "walk?model=q8&token=4&step=layers.1.ffn.down_proj&cell=0",
        question: "Which share of a layer's weights is in its feed-forward block?",
        answer: "Three quarters: 3 × 384 × 128 = 147,456 of 196,608. Where bits are to be saved, most can be saved here.",
    },
    {
        title: "From logits to a word",
        at: "walk?model=q8&token=4&step=logits",
        text: "A last product gives each of the 2,048 tokens a score. Temperature divides the scores before they become probabilities: below 1 likely tokens get likelier, above 1 unlikely ones do. Top-p then leaves out the tail, and the next token is drawn from the rest.",
        click: "Set the temperature to 2",
        next: "walk?model=q8&token=4&step=logits&temperature=2",
        question: "What does top-p do at temperature 0?",
        answer: "Nothing: at 0 the most probable token is always taken. All runs on this page are of this kind.",
    },
    {
        title: "The same with four bits, and with two",
        at: "compare?a=q8&b=bits&matrix=layers.1.ffn.down_proj&bits=4",
        text: "One matrix of the second model has fewer bits; all else is equal, and the same program runs. The map shows where the difference begins, and how it goes through every step behind it. The divergence says what of it arrives at the next word.",
        click: "Give it two bits",
        next: "compare?a=q8&b=bits&matrix=layers.1.ffn.down_proj&bits=2",
        question: "Which codes does a weight of two bits have here?",
        answer: "−1, 0 and 1: a weight is its group's scale, minus the scale, or nothing.",
    },
    {
        title: "A port that is wrong",
        at: "break?mistake=group-of-128",
        text: "Somebody has written such a program anew, with a scale for 128 numbers where the right one has a scale for 64. The text that it writes may look right. So its numbers are laid beside the right ones, step by step, and the first step that differs names the mistake.",
        click: "Try a finer one: halves are rounded up, not to even",
        next: "break?mistake=round-half-up",
        question: "Two right programs find the same numbers, to the last bit. Why is this not a matter of course?",
        answer: "Sums of whole numbers are exact in any order, but each addition in fp32 rounds. So the order of every such sum is laid down.",
    },
];

// The address of a stop, from 1 on.
export const stopAt = (n, place = STOPS[n - 1].at) => `#${place}&tour=${n}`;

// Where an address that names no place but the tour leads: #tour, #tour?stop=3.
export function tourStart(of) {
    const n = Number(of.get("stop") ?? 1);
    return stopAt(Number.isInteger(n) && n >= 1 && n <= STOPS.length ? n : 1);
}

// Shows a stop at the lower edge of the window, or none (0). The links stay the same elements, and keep the focus.
export function showStop(n) {
    const box = byId("tour") ?? panel();
    document.body.classList.toggle("touring", n > 0);
    box.hidden = n === 0;
    if (n === 0 || box.dataset.stop === String(n)) return;
    box.dataset.stop = String(n);
    const stop = STOPS[n - 1];
    byId("tour-title").textContent = `Stop ${n} of ${STOPS.length}: ${stop.title}`;
    byId("tour-body").replaceChildren(
        h("p", {}, guided(stop.text, data.words)),
        h("p", {}, h("a", { href: stopAt(n, stop.next), id: "tour-click" }, stop.click)),
        h("details", {}, h("summary", {}, stop.question), h("p", {}, stop.answer)),
    );
    for (const [id, to] of [
        ["tour-back", n - 1],
        ["tour-next", n + 1],
    ]) {
        if (STOPS[to - 1]) byId(id).href = stopAt(to);
        else byId(id).removeAttribute("href");
    }
    document.documentElement.style.setProperty("--tour", `${box.offsetHeight}px`);
}

function panel() {
    const box = h(
        "aside",
        { id: "tour", "aria-labelledby": "tour-title", hidden: true },
        h(
            "details",
            { open: true },
            h("summary", { id: "tour-title", "aria-live": "polite" }),
            h("div", { id: "tour-body", tabindex: "0", role: "group", "aria-labelledby": "tour-title" }),
        ),
        h(
            "p",
            { class: "tour-ways" },
            h("a", { id: "tour-back" }, "◀ Stop before"),
            h(
                "button",
                {
                    type: "button",
                    class: "link",
                    onclick: () => {
                        endTour();
                        showStop(0);
                        byId("main").focus();
                    },
                },
                "End the tour",
            ),
            h("a", { id: "tour-next" }, "Next stop ▶"),
        ),
    );
    document.body.append(box);
    return box;
}
