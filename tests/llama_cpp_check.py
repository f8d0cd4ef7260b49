"""Runs what --gguf-out writes in llama.cpp, on a CPU, and compares it with transformers on the same weights.

    python -m tests.llama_cpp_check

Needs torch, transformers, accelerate and cyllama, which has a build of llama.cpp. The tiny models, and SmolLM2 where
build/models/smollm2.gguf is there, are exported and written as GGUF:

    ids   of held-out stories, of odd texts and of a chat's first turn, by llama.cpp's tokenizer and by transformers'
    KL    the mean over the tokens of a few stories of KL(transformers || llama.cpp), in nats. transformers reads the
          same file with code of its own and computes in fp32; llama.cpp rounds activations to 8 bits
"""

import sys
import tempfile
from pathlib import Path

from formats.interpreter import need

if __name__ == "__main__":
    need("numpy", "ml_dtypes", "jinja2", "tokenizers", "gguf", "torch", "transformers", "accelerate", "cyllama")

import numpy as np

from export.__main__ import main as export
from tests.gguf_fixture import all_experts

ROOT = Path(__file__).resolve().parent.parent
STORIES = (ROOT / "models" / "held_out.txt").read_text(encoding="utf-8").split("\n\n")
SMOLLM2 = ROOT / "build" / "models" / "smollm2.gguf"
ODD = ("  two  blanks\n\n\tand a tab ", "it's 12345 o'clock, WE'LL see", "caf\u00e9 \u4f60\u597d \U0001f642\r\n", "")
N_TEXTS, N_TOKENS, LIMIT = 5, 200, 0.01
EXPORTS = {
    "q8": ["q8"],
    "w8a8": ["w8a8", "--no-smooth"],
    "gptq-sym": ["gptq", "--rtn", "--bits", "4", "--group", "64", "--sym"],
    "gptq": ["gptq", "--rtn", "--bits", "embed=8,attn=4,ffn=4", "--group", "64"],
    "gptq-ladder": ["gptq", "--rtn"],
    "awq": ["awq", "--rtn", "--group-size", "64"],
}
MIXTURES = {
    "a8w8": ["moe", "--no-smooth"],
    "a8w4": ["moe", "--no-smooth", "--format", "a8w4"],
    "a8w4-pure": ["moe", "--format", "a8w4", "--pure"],
    "mxfp8": ["moe", "--format", "mxfp8", "--pure"],
}


class LlamaCpp:
    """A GGUF file in llama.cpp."""

    def __init__(self, file):
        from cyllama.llama import llama_cpp

        self._lib = llama_cpp

        class Model(llama_cpp.LlamaModel):
            n_vocab = property(lambda self: self.get_vocab().n_vocab)  # LlamaContext of cyllama 0.2.18 asks for it

        llama_cpp.disable_logging()
        self._model = Model(str(file), llama_cpp.LlamaModelParams(), verbose=False)
        params = llama_cpp.LlamaContextParams()
        params.n_ctx = params.n_batch = params.n_ubatch = 512
        self._context = llama_cpp.LlamaContext(self._model, params, verbose=False)
        self._vocabulary = self._model.get_vocab()

    def ids(self, text, add_special, parse_special):
        return self._vocabulary.tokenize(text, add_special, parse_special)

    def logits(self, ids):
        """(n, vocab_size) of a sequence from position 0 on."""
        self._context.kv_cache_clear()
        batch = self._lib.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
        for position, token in enumerate(ids):
            batch.add(token, position, [0], True)
        self._context.decode(batch)
        return np.array([self._context.get_logits_ith(i) for i in range(len(ids))])


def log_softmax(logits):
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def check(name, source, arguments, folder):
    """Prints a line, and returns whether ids are equal and the divergence is within LIMIT."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    file = folder / f"{name}.gguf"
    if export([*arguments, str(source), str(folder / "m.bin"), "--quiet", "--gguf-out", str(file)]):
        return False
    theirs = LlamaCpp(file)
    tokenizer_files = {"gguf_file": source.name} if source.is_file() else {}
    tokenizer = AutoTokenizer.from_pretrained(source.parent if tokenizer_files else source, **tokenizer_files)
    # transformers 5.24 reads neither head_dim nor RoPE's rescaling of a GGUF file
    config = {} if source.is_file() else {"config": AutoConfig.from_pretrained(source)}
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32, **config).eval()
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who are you?"}], tokenize=False, add_generation_prompt=True
    )
    texts, differing, divergences = STORIES[:N_TEXTS], [], []
    for text in (*texts, *ODD, turn):
        is_turn = text is turn
        if tokenizer(text, add_special_tokens=not is_turn).input_ids != theirs.ids(text, not is_turn, is_turn):
            differing.append(text[:30])
    for text in texts:
        ids = tokenizer(text).input_ids[:N_TOKENS]
        with torch.no_grad():
            p = log_softmax(model(torch.tensor([ids])).logits[0].numpy())
        q = log_softmax(theirs.logits(ids))
        divergences += (np.exp(p) * (p - q)).sum(axis=-1).tolist()
    kl = float(np.mean(divergences))
    ids = "equal" if not differing else f"differ in {differing}"
    print(f"{name:26} ids {ids}, KL {kl:.5f} over {len(divergences)} tokens", flush=True)
    return not differing and kl <= LIMIT


def main():
    sources = {name: ROOT / "models" / name for name in ("tiny-llama", "tiny-qwen3")}
    if SMOLLM2.exists():
        sources["smollm2"] = SMOLLM2
    with tempfile.TemporaryDirectory() as folder:
        sources["tiny-qwen3-moe"] = all_experts(ROOT / "models" / "tiny-qwen3-moe", Path(folder) / "tiny-qwen3-moe")
        good = [
            check(f"{model}.{name}", source, arguments, Path(folder))
            for model, source in sources.items()
            for name, arguments in (MIXTURES if "moe" in model else EXPORTS).items()
        ]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
