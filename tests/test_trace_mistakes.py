"""Wrong ports that single operations do not show, or not all of them: which golden trace names each.

A port is the reference with one function replaced. As docs/numerics.md has it for traces of late positions, it takes
the keys and values of earlier tokens from the golden.
"""

from contextlib import ExitStack
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest

from formats.checkpoint import Checkpoint
from golden import forward as passes
from golden import gptq, q8, routing, w8a8
from golden.make import LATE_TRACES
from golden.moe import MoE
from golden.q8 import Q8
from golden.schemes import RANDOM_MODELS, read_file
from golden.trace import Recorder, at_positions, compare, is_cached, positions_of, read_trace
from models.random_models import write_random_models
from tests.helpers import DATA, MODELS, ROOT, first_bad

CHUNK = 128  # tokens of a prompt that many programs take at once


@cache
def scheme_of(name):
    """Config and scheme of a trace's model, by the trace's name."""
    model, variant, *_ = name.split(".")
    if variant == "q8":
        checkpoint = Checkpoint(MODELS / model)
        return checkpoint.config, Q8(checkpoint)
    scheme = read_file(ROOT / "build" / "models" / f"{model}.{variant}.bin")
    return scheme.config, scheme


def trace_of_a_port(name, golden):
    """The trace that the reference, as it is now, makes of a golden trace's tokens."""
    config, scheme = scheme_of(name)
    recorder, past = Recorder(), np.delete(np.arange(len(golden["tokens"])), positions_of(golden))

    def step(name, value):
        if is_cached(name):
            value = value.copy()
            value[past] = golden[name][past]
        return recorder(name, value)

    step("tokens", golden["tokens"])
    passes.forward(config, scheme, golden["tokens"], step)
    return at_positions(recorder.tensors, golden["positions"]) if "positions" in golden else recorder.tensors


def first_wrong_step(name, changes=()):
    """What `golden diff` names first in the trace of a port. changes: module, name of a function, replacement."""
    golden = read_trace(DATA / f"{name}.trace.safetensors")
    with ExitStack() as stack:
        for owner, function, replacement in changes:
            stack.enter_context(patch.object(owner, function, replacement))
        return first_bad(compare(golden, trace_of_a_port(name, golden)))


# ---- mistakes


def off_by(change):
    """The mask of attention: the first token of a later chunk sees so many positions more than it should."""

    def is_future(n, n_keys):
        last = np.arange(n_keys - n, n_keys)[:, None, None]
        return np.arange(n_keys) > last + change * ((last > 0) & (last % CHUNK == 0))

    return [(passes, "is_future", is_future)]


def exchanged_from(position):
    """Keys are stored as values and values as keys, from a position on."""
    attention = passes.attention

    def wrong(step, layer, q, k, v):
        late = np.arange(len(k))[:, None, None] >= position
        return attention(step, layer, q, np.where(late, v, k), np.where(late, k, v))

    return [(passes, "attention", wrong)]


def weights_before_down():
    """An expert's hidden values are multiplied by the router's weight, its outputs then added as they are."""
    route, swiglu, combine = passes.route, passes.swiglu, passes.combine
    found = []

    def remembered(*args):
        found[:] = route(*args)
        return tuple(found)

    def weighted(gate, up):
        return swiglu(gate, up) * found[1][..., None] if gate.ndim == 3 else swiglu(gate, up)

    def added(outputs, chosen, weights):
        return combine(outputs, chosen, np.ones_like(weights))

    return [(passes, "route", remembered), (passes, "swiglu", weighted), (passes, "combine", added)]


def always_normalized():
    route = passes.route
    return [(passes, "route", lambda logits, n_active, _: route(logits, n_active, True))]


def silu_from(least):
    """Gates below it give 0."""
    swiglu = passes.swiglu
    return [(passes, "swiglu", lambda gate, up: np.where(gate < least, np.float32(0), swiglu(gate, up)))]


def scale_of_the_place_before():
    def quantized(self, name, x):
        if not self.static:
            return q8.quantize(x, x.shape[-1])
        places = list(self.activation_scales)
        return w8a8.quantize_static(x, self.activation_scales[places[max(places.index(name) - 1, 0)]])

    return [(w8a8.W8A8, "quantized", quantized)]


def router_from_quantized():
    def logits(x, weight):
        return routing.router_logits(q8.dequantize(q8.quantize(x, x.shape[-1])), weight)

    return [(passes, "router_logits", logits)]


def one_scale_for_all_experts():
    def quantized(self, name, x):
        n_active = self.config.moe.n_active if name.endswith("moe.swiglu") else 1
        found = q8.quantize(x.reshape(-1, n_active * x.shape[-1]), n_active * x.shape[-1])
        return q8.Quantized(found.codes.reshape(x.shape), np.repeat(found.scales, n_active, axis=0))

    return [(MoE, "quantized", quantized)]


BOUNDARIES = [f"{name}.boundary" for name, traces in LATE_TRACES.items() if "boundary" in traces]
MOE, GPTQ = "tiny-qwen3-moe.moe-a8w8", "tiny-llama.gptq-ladder"
EARLY = ["tiny-llama.q8", GPTQ, MOE]  # traces from position 0 on
RANDOM_GPTQ, RANDOM_MOE = (f"{name}.{variant}" for name, (_, variant) in RANDOM_MODELS.items())

# Changes, the step that each trace names, and traces that name none, because they have nothing of the kind.
MISTAKES = {
    **{
        f"attention sees one position {what} at the start of a chunk": (
            off_by(change), dict.fromkeys(BOUNDARIES, "layers.0.attn.scores"), [*EARLY, "tiny-llama.q8.decode"],
        )
        for what, change in (("fewer", -1), ("more", 1))
    },
    "keys and values exchanged at a late position": (
        exchanged_from(CHUNK),
        dict.fromkeys(["tiny-llama.q8.decode", *BOUNDARIES], "layers.0.attn.scores"), EARLY,
    ),
    "router weight applied before down's quantization": (
        weights_before_down(), {MOE: "layers.1.moe.swiglu", RANDOM_MOE: "layers.0.moe.swiglu"}, [],
    ),
    "experts' weights normalized whatever the file says": (
        always_normalized(), {RANDOM_MOE: "layers.0.moe.weights"}, [MOE],
    ),
    "activations not gathered": (
        [(gptq, "gather", lambda x, _order: x)], {RANDOM_GPTQ: "layers.0.attn.norm.gathered"}, [GPTQ],
    ),
    "activations gathered by the inverse of the order": (
        [(gptq, "gather", lambda x, order: x[:, np.argsort(order)])],
        {RANDOM_GPTQ: "layers.0.attn.norm.gathered"}, [GPTQ],
    ),
    "silu is 0 below -7": (
        silu_from(-7),
        dict.fromkeys(["tiny-llama.q8", "tiny-llama.w8a8", "tiny-qwen3.w8a8-block32"], "layers.3.ffn.swiglu"), [GPTQ],
    ),
    "static scale of the place before": (
        scale_of_the_place_before(),
        dict.fromkeys(["tiny-llama.w8a8-static", "tiny-qwen3.w8a8-static"], "layers.0.attn.mix.q"),
        ["tiny-llama.w8a8"],
    ),
    "router from the quantized input": (
        router_from_quantized(), {MOE: "layers.1.moe.router", RANDOM_MOE: "layers.0.moe.router"}, [],
    ),
    "one scale for all experts of a token": (
        one_scale_for_all_experts(), {MOE: "layers.1.moe.swiglu.q", RANDOM_MOE: "layers.0.moe.swiglu.q"}, [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*BOUNDARIES, RANDOM_GPTQ, RANDOM_MOE])
def test_a_right_port_passes(name):
    assert first_wrong_step(name) is None


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_trace_names_a_mistake(mistake):
    changes, named, none = MISTAKES[mistake]
    assert {name: first_wrong_step(name, changes) for name in [*named, *none]} == named | dict.fromkeys(none)


def test_random_models_are_what_they_are_said_to_be(tmp_path):
    """And what models/random_models.py writes."""
    write_random_models(tmp_path)
    for name in RANDOM_MODELS:
        for path in (MODELS / name).iterdir():
            assert (tmp_path / name / path.name).read_bytes() == path.read_bytes()
    assert not scheme_of(RANDOM_MOE)[0].moe.norm_topk_prob
    assert scheme_of(MOE)[0].moe.norm_topk_prob
    orders = scheme_of(RANDOM_GPTQ)[1].orders
    assert len(orders) == 2 * 4  # places of two layers
    assert not any(np.array_equal(order, np.arange(len(order))) for order in orders.values())
