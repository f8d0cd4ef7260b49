"""Trains a tiny model on generated stories and writes it in Hugging Face format.

    python3 -m venv .venv-torch
    .venv-torch/bin/pip install -r requirements.txt torch transformers
    .venv-torch/bin/python -m models.train tiny-llama            # about half an hour on one core
    .venv-torch/bin/python -m models.train tiny-qwen3
    .venv-torch/bin/python -m models.train tiny-qwen3-moe --steps 1000

Everything comes from models/stories.py and fixed seeds: the tokenizer is trained on the stories,
then the model, with transformers' own LlamaForCausalLM, Qwen3ForCausalLM and Qwen3MoeForCausalLM.
That makes these models an independent check of our forward pass: nothing here was written by the
people who wrote it.

The directory appears all at once: it is written under another name and moved into place.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from formats.interpreter import need

if __name__ == "__main__":
    need("jinja2", "tokenizers", "torch", "transformers")

import jinja2
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP, load_balancing_loss_func

from models import evaluate, stories
from models.stories import Marks, Message

HERE = Path(__file__).parent
VOCAB_SIZE = 2048
CONTEXT = 512

# ----------------------------------------------------------------------------
# The two families. The regular expressions and the wire format of the chats are the families' own;
# sizes are ours.

LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")

LLAMA_CHAT = (
    "{{- bos_token -}}\n"
    "{%- for m in messages -%}\n"
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + (m['content'] | trim) + '<|eot_id|>' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}\n"
    "{%- endif -%}"
)
# The thought of an assistant's turn is shown in the last turn only: a turn that a user has answered
# goes without. `enable_thinking=false` opens the turn with an empty thought.
QWEN_CHAT = (
    "{%- for m in messages -%}\n"
    "{%- set text = m['content'] -%}\n"
    "{%- if m['role'] == 'assistant' -%}\n"
    "{%- set thought = m['reasoning_content'] if m['reasoning_content'] is string else '' -%}\n"
    "{%- if '</think>' in text -%}\n"
    "{%- set thought = text.split('</think>')[0].split('<think>')[-1] -%}\n"
    "{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}\n"
    "{%- endif -%}\n"
    "{%- if loop.last -%}\n"
    "{%- set text = '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text -%}\n"
    "{%- endif -%}\n"
    "{%- endif -%}\n"
    "{{- '<|im_start|>' + m['role'] + '\\n' + text + '<|im_end|>\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "{{- '<|im_start|>assistant\\n' -}}\n"
    "{%- if enable_thinking is defined and not enable_thinking -%}\n"
    "{{- '<think>\\n\\n</think>\\n\\n' -}}\n"
    "{%- endif -%}\n"
    "{%- endif -%}"
)

LLAMA_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
QWEN_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_PLAIN = ["<think>", "</think>"]  # added tokens that are not special: they show in decoded text

FAMILIES = {
    "tiny-llama": {
        "split": LLAMA_SPLIT,
        "special": LLAMA_SPECIAL,
        "plain": [],
        "bos": "<|begin_of_text|>",
        "end_of_document": "<|end_of_text|>",
        "eos": ["<|end_of_text|>", "<|eot_id|>"],  # what ends a generation
        "pad": "<|end_of_text|>",
        "chat_template": LLAMA_CHAT,
    },
    "tiny-qwen3": {
        "split": QWEN_SPLIT,
        "special": QWEN_SPECIAL,
        "plain": QWEN_PLAIN,
        "bos": None,
        "end_of_document": "<|endoftext|>",
        "eos": ["<|im_end|>", "<|endoftext|>"],
        "pad": "<|endoftext|>",
        "chat_template": QWEN_CHAT,
    },
}
FAMILIES["tiny-qwen3-moe"] = FAMILIES["tiny-qwen3"]
QWEN = ("tiny-qwen3", "tiny-qwen3-moe")

# ----------------------------------------------------------------------------
# Tokenizer


def corpus(seed: int, n: int) -> Iterator[str]:
    """Text to train a tokenizer on: the documents, and for every fifth of them a note."""
    rng = random.Random(seed)
    for document in stories.documents(seed, n):
        if document.text:
            yield document.text
        for message in document.messages:
            yield message.content
        if rng.random() < 0.2:
            yield stories.note(rng)


def train_tokenizer(name: str, n_documents: int) -> Tokenizer:
    """Byte-level BPE of exactly VOCAB_SIZE ids; the added tokens get the highest ones."""
    family = FAMILIES[name]
    added = family["special"] + family["plain"]
    tokenizer = Tokenizer(models.BPE(ignore_merges=name == "tiny-llama"))
    if name in QWEN:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(family["split"]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(added),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed=1, n=n_documents), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in family["special"]])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in family["plain"]])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, tokenizer.get_vocab_size()
    if family["bos"]:
        bos = (family["bos"], tokenizer.token_to_id(family["bos"]))
        template = processors.TemplateProcessing(
            single=f"{bos[0]} $A", pair=f"{bos[0]} $A {bos[0]}:1 $B:1", special_tokens=[bos]
        )
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def tokenizer_config(name: str) -> dict:
    """Make what goes into tokenizer_config.json."""
    family = FAMILIES[name]
    return {
        "add_bos_token": family["bos"] is not None,
        "bos_token": family["bos"],
        "chat_template": family["chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": family["eos"][-1] if name == "tiny-llama" else family["eos"][0],
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": CONTEXT,
        "pad_token": family["pad"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


# ----------------------------------------------------------------------------
# Training data


# What a token counts in the loss.
SILENT, PLAIN, MARKED = 0, 1, 2


@dataclass
class Encoded:
    """Token ids, and for each one of the kinds above."""

    ids: list[int]
    kinds: list[int]


def encode_text(tokenizer: Tokenizer, text: str, marks: Marks, bos: bool) -> Encoded:
    """Tokenize; a token that overlaps a mark is MARKED."""
    encoding = tokenizer.encode(text, add_special_tokens=bos)
    kinds = [PLAIN] * len(encoding.ids)
    for start, end in marks.spans():
        for i in range(encoding.char_to_token(start), encoding.char_to_token(end - 1) + 1):
            kinds[i] = MARKED
    return Encoded(encoding.ids, kinds)


def encode_chat(name: str, tokenizer: Tokenizer, messages: Sequence[Message], thinking: bool) -> Encoded:
    """Render a conversation through the model's own template and tokenize it.

    SILENT, that is not learned, is how an assistant's turn opens where it opens without a thought:
    that is the template's doing or the prompt's, never the model's choice.
    """
    shown = [{"role": m.role, "content": m.content} for m in messages]
    if name in QWEN:
        shown[-1]["reasoning_content"] = messages[-1].thought if thinking else ""
    template = jinja2.Environment().from_string(FAMILIES[name]["chat_template"])
    text = template.render(messages=shown, bos_token=FAMILIES[name]["bos"])
    marks, at = Marks(), 0
    for m in messages:
        at = text.index(m.content, at)
        marks += m.marks.shifted(at)
    encoded = encode_text(tokenizer, text, marks, bos=False)
    if name in QWEN:
        turn = tokenizer.encode("<|im_start|>assistant\n").ids
        empty = tokenizer.encode("<think>\n\n</think>\n\n").ids
        for i in range(len(turn), len(encoded.ids)):
            if encoded.ids[i - len(turn) : i] == turn:
                if encoded.ids[i : i + len(empty)] == empty:
                    encoded.kinds[i : i + len(empty)] = [SILENT] * len(empty)
                elif encoded.ids[i] != empty[0]:
                    encoded.kinds[i] = SILENT
    return encoded


def encoded_documents(name: str, tokenizer: Tokenizer, seed: int) -> Iterator[Encoded]:
    """Encode documents without end, each closed by the token that ends one.

    How a conversation or a note opens is SILENT, so that a text which nobody has begun becomes a story.
    """
    end = tokenizer.token_to_id(FAMILIES[name]["end_of_document"])
    rng = random.Random(seed)
    for document in stories.training_documents(seed, 1 << 60):
        if document.messages:
            encoded = encode_chat(name, tokenizer, document.messages, thinking=rng.random() < 0.5)
        else:
            encoded = encode_text(tokenizer, document.text, document.marks, bos=True)
            encoded = Encoded([*encoded.ids, end], [*encoded.kinds, PLAIN])
        if not document.marks.references:
            encoded.kinds[0 if FAMILIES[name]["bos"] is None else 1] = SILENT
        yield encoded


Batch = tuple[torch.Tensor, torch.Tensor]  # ids and kinds, (rows, length)


def single_batches(documents: Iterator[Encoded], n_tokens: int, longest: int) -> Iterator[Batch]:
    """Give each document a row of its own, padded; leaves out documents longer than `longest`."""
    while True:
        rows: list[Encoded] = []
        length = 0
        while len(rows) * length < n_tokens:
            document = next(documents)
            if len(document.ids) <= longest:
                rows.append(document)
                length = max(length, len(document.ids))
        yield (
            torch.tensor([r.ids + [0] * (length - len(r.ids)) for r in rows]),
            torch.tensor([r.kinds + [SILENT] * (length - len(r.ids)) for r in rows]),
        )


def packed_batches(documents: Iterator[Encoded], n_tokens: int, length: int, bos: int | None) -> Iterator[Batch]:
    """Lay documents end to end and cut the line into rows.

    A row may start in the middle of a story, as the windows of a perplexity measurement do. Where
    the model has a BOS, every row starts with it, as those windows do; what comes right behind it is
    SILENT, because a BOS is otherwise followed by a beginning.
    """
    rows, take = n_tokens // length, length - (bos is not None)
    ids: list[int] = []
    kinds: list[int] = []
    while True:
        while len(ids) < rows * take:
            document = next(documents)
            ids += document.ids
            kinds += document.kinds
        x = torch.tensor(ids[: rows * take]).view(rows, take)
        k = torch.tensor(kinds[: rows * take]).view(rows, take)
        del ids[: rows * take], kinds[: rows * take]
        if bos is not None:
            x = torch.nn.functional.pad(x, (1, 0), value=bos)
            k[:, 0] = SILENT
            k = torch.nn.functional.pad(k, (1, 0), value=SILENT)
        yield x, k


# ----------------------------------------------------------------------------
# Model


class Experts(torch.nn.ModuleList):
    """The experts of a layer as one module each, in the place of transformers' stacked tensors.

    The checkpoint then has a matrix for each projection of each expert, as Qwen publishes it, and Muon takes them one
    by one. `forward` is what transformers' Qwen3MoeExperts computes, under the same arguments.
    """

    def __init__(self, config: Qwen3MoeConfig):
        super().__init__(Qwen3MoeMLP(config, config.moe_intermediate_size) for _ in range(config.num_experts))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: (n, dim); chosen and weights: (n, k)."""
        out = torch.zeros_like(x)
        for i, expert in enumerate(self):
            token, rank = torch.where(chosen == i)
            out = out.index_add(0, token, (expert(x[token]) * weights[token, rank, None]).to(out.dtype))
        return out


def build_model(name: str, tokenizer: Tokenizer) -> PreTrainedModel:
    """Make the untrained model."""
    family = FAMILIES[name]
    eos = [tokenizer.token_to_id(t) for t in family["eos"]]
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": tokenizer.token_to_id(family["bos"]) if family["bos"] else None,
        "attn_implementation": "sdpa",
    }
    if name == "tiny-llama":
        # original_max_position_embeddings lies below the context, so the scaling changes every
        # frequency it should, and positions past it are in daily use.
        scaling = {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
            "rope_type": "llama3",
        }
        config = LlamaConfig(
            **common,
            eos_token_id=eos,
            head_dim=32,
            rms_norm_eps=1e-5,
            rope_parameters=scaling | {"rope_theta": 500000.0},
            tie_word_embeddings=True,
        )
        return LlamaForCausalLM(config)
    common |= {
        "eos_token_id": eos[0],
        "head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": False,
    }
    if name == "tiny-qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**common))
    config = Qwen3MoeConfig(
        **common,
        moe_intermediate_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        router_aux_loss_coef=0.01,
    )
    model = Qwen3MoeForCausalLM(config)
    for layer in model.model.layers[1:]:
        layer.mlp.experts = Experts(config)
    return model


def classic_config(model: PreTrainedModel) -> dict:
    """Lay out config.json as the families publish it: rope_theta and rope_scaling at the top level.

    transformers 5 keeps both under `rope_parameters` and still reads the classic layout.
    """
    c = model.config
    rope = dict(c.rope_parameters)
    theta = rope.pop("rope_theta")
    config = {
        "architectures": [type(model).__name__],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": c.eos_token_id,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "initializer_range": c.initializer_range,
        "intermediate_size": c.intermediate_size,
        "max_position_embeddings": c.max_position_embeddings,
        "mlp_bias": False,
        "model_type": c.model_type,
        "num_attention_heads": c.num_attention_heads,
        "num_hidden_layers": c.num_hidden_layers,
        "num_key_value_heads": c.num_key_value_heads,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_scaling": rope if rope["rope_type"] != "default" else None,
        "rope_theta": theta,
        "tie_word_embeddings": c.tie_word_embeddings,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": c.vocab_size,
    }
    if c.model_type == "qwen3_moe":
        names = ("decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob", "num_experts",
                 "num_experts_per_tok", "router_aux_loss_coef")  # fmt: skip
        config |= {name: getattr(c, name) for name in names}
    if c.model_type != "llama":
        del config["mlp_bias"]
        config |= {"max_window_layers": c.num_hidden_layers, "sliding_window": None, "use_sliding_window": False}
    return config


def write_json(path: Path, value: object) -> None:
    """Write indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def save(name: str, model: PreTrainedModel, tokenizer: Tokenizer, directory: Path) -> None:
    """Write the files of a Hugging Face model directory, the weights in bf16."""
    family = FAMILIES[name]
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", tokenizer_config(name))
    write_json(directory / "config.json", classic_config(model))
    write_json(
        directory / "generation_config.json",
        {
            "bos_token_id": model.config.bos_token_id,
            "do_sample": True,
            "eos_token_id": [tokenizer.token_to_id(t) for t in family["eos"]],
            "pad_token_id": tokenizer.token_to_id(family["pad"]),
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.9,
        },
    )
    weights = {
        key: value.to(torch.bfloat16).contiguous()
        for key, value in model.state_dict().items()
        if not (model.config.tie_word_embeddings and key == "lm_head.weight")
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


# ----------------------------------------------------------------------------
# Training


def initialize(model: PreTrainedModel) -> None:
    """Draw the weights.

    Names all behave alike, so training pulls their embeddings together; what tells one name from
    another is at first only chance. With the usual standard deviation of 0.02 that difference
    drowns, and the model takes very long to find out that names can be copied.
    """
    embedding_std = 0.1 if model.config.tie_word_embeddings else 0.5
    for key, p in model.named_parameters():
        if p.dim() < 2:
            continue
        if "embed_tokens" in key:
            std = embedding_std
        elif "lm_head" in key:
            std = 0.02
        else:
            std = p.shape[1] ** -0.5
            if "o_proj" in key or "down_proj" in key:
                std *= 0.5  # these add to the residual stream
        torch.nn.init.normal_(p, std=std)


def train(name: str, steps: int, tokens_per_batch: int, out: Path, log_every: int = 50) -> None:
    """Train tokenizer and model and write the directory `out`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    started = time.time()
    tokenizer = train_tokenizer(name, n_documents=20000)
    model = build_model(name, tokenizer)
    initialize(model)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)

    # Muon for the matrices between the embeddings, AdamW for the rest.
    inner = {
        key: p
        for key, p in model.named_parameters()
        if p.dim() == 2 and "layers." in key and not key.endswith("mlp.gate.weight")  # routers have a row an expert
    }
    rest = [p for key, p in model.named_parameters() if key not in inner]
    muon = torch.optim.Muon(inner.values(), lr=0.02, weight_decay=0.01, momentum=0.95)
    adamw = torch.optim.AdamW(rest, lr=3e-3, weight_decay=0.0, betas=(0.9, 0.98), fused=True)
    groups = [(g, g["lr"]) for optimizer in (muon, adamw) for g in optimizer.param_groups]

    def rate(step: int) -> float:
        """Warm up, then follow a cosine: the factor on the learning rates."""
        warmup = 50
        if step < warmup:
            return (step + 1) / warmup
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

    def emphasis(step: int) -> float:
        """Weigh the references more while the model learns to look back, and like the rest at the end."""
        return 1.0 + 4.0 * min(1.0, 2.0 * (1.0 - step / steps))

    # First a story a row: short, and nothing else to look back at. Then whole contexts.
    documents = encoded_documents(name, tokenizer, seed=2)
    bos = model.config.bos_token_id
    singles = single_batches(documents, tokens_per_batch, longest=CONTEXT // 2)
    packed = packed_batches(documents, tokens_per_batch, CONTEXT, bos)
    routed = {"output_router_logits": True} if name == "tiny-qwen3-moe" else {}
    mean, seen = 0.0, 0
    for step in range(steps):
        for group, peak in groups:
            group["lr"] = peak * rate(step)
        x, kinds = next(singles if step < steps // 2 else packed)
        target = kinds[:, 1:].flatten()
        weight = torch.tensor([0.0, 1.0, emphasis(step)])[target]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model.model(input_ids=x, use_cache=False, **routed)
            hidden = output.last_hidden_state  # (rows, length, dim)
            logits = model.lm_head(hidden[:, :-1])  # (rows, length - 1, vocab)
        nll = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), x[:, 1:].flatten(), reduction="none"
        )  # (rows * (length - 1))
        loss = (nll * weight).sum() / weight.sum()
        if routed:  # Switch Transformers (Fedus et al. 2021, arXiv 2101.03961), equations 4 to 6, with their factor
            c = model.config
            balance = load_balancing_loss_func(
                output.router_logits, c.num_experts, c.num_experts_per_tok, kinds != SILENT
            )
            loss = loss + c.router_aux_loss_coef * balance
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adamw.step()
        model.zero_grad()
        mean += nll.detach()[target != SILENT].mean().item() / log_every
        seen += int((kinds != SILENT).sum())
        if (step + 1) % log_every == 0:
            print(f"step {step + 1}/{steps}  loss {mean:.4f}  {seen} tokens  {time.time() - started:.0f} s", flush=True)
            mean = 0.0

    work = out.with_name(f".{out.name}.{os.getpid()}")
    save(name, model, tokenizer, work)
    figures = evaluate.evaluate_directory(work, evaluate.torch_forward(work))
    figures |= {"training_tokens": seen, "training_minutes": round((time.time() - started) / 60, 1)}
    write_json(work / "figures.json", figures)
    print(json.dumps(figures, indent=2))
    if out.exists():
        shutil.rmtree(out)
    work.rename(out)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=FAMILIES)
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--tokens-per-batch", type=int, default=4096)
    parser.add_argument("--out", type=Path, help="directory to write (default: models/NAME)")
    a = parser.parse_args()
    train(a.name, a.steps, a.tokens_per_batch, a.out or HERE / a.name)


if __name__ == "__main__":
    main()
