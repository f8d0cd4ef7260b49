// What a step reads, and what the places of its row are called.

import { layerOf, shortName } from "./trace.js";

// What a step reads: its input steps, by the step's full name.
export function inputsOf(name, context) {
    const layer = layerOf(name);
    const at = (step) => `layers.${layer}.${step}`;
    const { trace, data, model } = context;
    const isRotated = "rotate" in trace;
    const stream = layer > 0 ? `layers.${layer - 1}.ffn.residual` : isRotated ? "rotate" : "embed";
    const end = `layers.${model.n_layers - 1}.ffn.residual`;
    switch (shortName(name)) {
        case "rotate":
            return ["embed"];
        case "rotate_back":
            return [end];
        case "attn.norm":
            return [stream];
        case "ffn.norm":
            return [at("attn.residual")];
        case "norm":
            return [isRotated ? "rotate_back" : end];
        case "attn.q_norm":
            return [at("attn.q_proj")];
        case "attn.k_norm":
            return [at("attn.k_proj")];
        case "attn.q_rope":
            return [at("attn.q_norm") in trace ? at("attn.q_norm") : at("attn.q_proj")];
        case "attn.k_rope":
            return [at("attn.k_norm") in trace ? at("attn.k_norm") : at("attn.k_proj")];
        case "attn.scores":
            return [at("attn.q_rope"), at("attn.k_rope")];
        case "attn.probs":
            return [at("attn.scores")];
        case "attn.mix":
            return [at("attn.probs"), at("attn.v_proj")];
        case "attn.residual":
            return [stream, at("attn.o_proj")];
        case "ffn.swiglu":
            return [at("ffn.gate_proj"), at("ffn.up_proj")];
        case "moe.router":
            return [at("ffn.norm")];
        case "moe.experts":
        case "moe.weights":
            return [at("moe.router")];
        case "moe.swiglu":
            return [at("moe.gate_up_proj")];
        case "moe.mix":
            return [at("moe.down_proj"), at("moe.weights")];
        case "ffn.residual":
            return [at("attn.residual"), at("moe.mix") in trace ? at("moe.mix") : at("ffn.down_proj")];
        case "logits":
            return ["norm.q"];
        default:
            if (name.endsWith(".q")) return [name.slice(0, -2)];
            return data.contract.inputs[shortName(name)] ? [`${at(data.contract.inputs[shortName(name)])}.q`] : [];
    }
}

export const isProduct = (name, context) =>
    shortName(name) === "logits" || shortName(name) in context.data.contract.inputs;

// Head and value of a place in a row, as text: "value 5 of head 2".
export function placeOf(name, i, context) {
    const shape = context.trace[name].shape;
    const step = shortName(name);
    if (step === "logits") return `the score of “${context.vocabulary[i].trim() || "␣"}”`;
    if (shape.length === 3) {
        const of = step.startsWith("moe.") ? "of choice" : "of head";
        return `value ${i % shape[2]} ${of} ${Math.floor(i / shape[2])}`;
    }
    return `value ${i}`;
}
