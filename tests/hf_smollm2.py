"""SmolLM2 in transformers, from the same GGUF file, against the reference and every program.

    python -m tests.hf_smollm2 [--quick]    needs torch, transformers, gguf and pytest; `make smollm2` first

transformers reads and dequantizes the file by code of its own. Compared are: fp32 logits with golden.forward's; the
perplexity of a text; chat prompts, id by id, with apply_chat_template; the directory that export/dequantized.py makes
of the file: its logits with those of the file, and the ids of its tokenizer with the program's; and ten greedy
continuations of 60 ids with each program's, up to the first id that differs (not with --quick). A program that is
emulated on a CPU would take an hour: there, and for fp32, the reference says what it would choose behind each prefix.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from formats.interpreter import need

if __name__ == "__main__":
    need("numpy", "gguf", "pytest", "tokenizers", "torch", "transformers")

import numpy as np

from export.dequantized import write_dequantized
from export.tokenizer import tokenizer_section
from formats.source import open_gguf
from golden.forward import Fp32, Scheme, forward
from golden.perplexity import encode, load_tokenizer, perplexity
from golden.real import CHAT, QUESTIONS
from golden.schemes import SCHEMES
from models.smollm2 import documentation
from tests.test_tokenizer import FIXED_STRINGS, Pair, random_strings

ROOT = Path(__file__).resolve().parent.parent
FILES = ROOT / "build" / "models"
GGUF = FILES / "smollm2.gguf"
N_TOKENS = 60
CONTEXT, N_SCORED = 512, 1024
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TEN = (*(CHAT.format(question) for question in (
    *QUESTIONS, "How do I boil an egg?", "Who wrote Hamlet?", "What is photosynthesis? Answer in one sentence.")),
    "Once upon a time, in a small village by the river,", "def fibonacci(n):\n",
    "The three most important things in life are", "Water boils at")  # fmt: skip


@cache
def model():
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    return AutoModelForCausalLM.from_pretrained(
        FILES, gguf_file=GGUF.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def transformers_logits(tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad():
        return model()(torch.tensor(np.asarray(tokens)[None].astype(np.int64))).logits[0].numpy()


def transformers_greedy(ids: list[int]) -> list[int]:
    """Up to N_TOKENS ids, the end of the text included."""
    import torch

    eos = open_gguf(GGUF).generation.eos_ids
    with torch.no_grad():
        out = model().generate(torch.tensor([ids]), max_new_tokens=N_TOKENS, do_sample=False, eos_token_id=eos,
                               repetition_penalty=1.0)  # fmt: skip
    return out[0, len(ids):].tolist()  # fmt: skip


def program_ids(program: str, file: Path, ids: list[int]) -> list[int]:
    command = [ROOT / program, file, "--ids", ",".join(map(str, ids)), "-n", N_TOKENS, "-t", "0", "--print-ids"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    return [int(i) for i in done.stdout.split(",")]


def agreement(ours: list[int], theirs: list[int]) -> int:
    """Ids before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def check_logits() -> bool:
    gguf, tokenizer = open_gguf(GGUF), load_tokenizer(GGUF)
    tokens = np.array(tokenizer.encode(TEN[0] + "The capital of France is Paris.").ids)
    ours, theirs = forward(gguf.config, Fp32(gguf), tokens), transformers_logits(tokens)
    error = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
    print(
        f"fp32 logits of {len(tokens)} tokens: relative difference {error:.1e}, largest {abs(ours - theirs).max():.1e}"
    )
    return error < 1e-4


def check_perplexity() -> bool:
    gguf, text = open_gguf(GGUF), documentation()
    ids, bos = encode(GGUF, text[len(text) // 2 :][: N_SCORED * 8])
    ids, scheme = ids[:N_SCORED], Fp32(gguf)
    ours, n = perplexity(lambda tokens: forward(gguf.config, scheme, tokens), ids, bos, CONTEXT)
    theirs, _ = perplexity(transformers_logits, ids, bos, CONTEXT)
    print(f"perplexity of {n} tokens, windows of {CONTEXT}: {ours:.5f}, transformers {theirs:.5f}")
    return abs(ours - theirs) < 1e-3


def check_chat() -> bool:
    """Conversations of one to three turns, with and without a system message."""
    from transformers import PreTrainedTokenizerFast

    files, ours = open_gguf(GGUF).tokenizer_files(), load_tokenizer(GGUF)
    theirs = PreTrainedTokenizerFast(tokenizer_object=load_tokenizer(GGUF), **files.config)
    good = True
    for question in QUESTIONS:
        for before in (
            [],
            [{"role": "system", "content": "Be brief."}],
            [{"role": "user", "content": "Hi 42!"}, {"role": "assistant", "content": " Hello. "}],
        ):
            conversation = [*before, {"role": "user", "content": question}]
            expected = theirs.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
            system = "" if before and before[0]["role"] == "system" else f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
            text = system + "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in conversation)
            good &= ours.encode(text + "<|im_start|>assistant\n").ids == list(expected)
    print(f"chat prompts: {'the same ids' if good else 'OTHER IDS'} as apply_chat_template")
    return good


def check_directory() -> bool:
    """Whether transformers makes the same of the directory as of the file, and its tokenizer the program's ids."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    text = documentation()
    texts = [text[i : i + 500].encode() for i in range(0, len(text), 500)]
    texts += FIXED_STRINGS + random_strings(17, 3000, ["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    with tempfile.TemporaryDirectory() as folder:
        hf_dir = Path(folder) / "hf"
        write_dequantized(GGUF, hf_dir)
        loaded = AutoModelForCausalLM.from_pretrained(hf_dir, attn_implementation="eager").eval()
        tokenizer = AutoTokenizer.from_pretrained(hf_dir)
        pair = Pair(hf_dir, Path(folder), ROOT / "build" / "tokenize_tool", loaded.config.vocab_size)
        pair.section.write_bytes(tokenizer_section(GGUF, loaded.config.vocab_size))
        ours = pair.encode(texts)
        theirs = [tokenizer(t.decode("utf-8", errors="replace")).input_ids for t in texts]
        same = sum(a == b for a, b in zip(ours, theirs, strict=True))
        chat = tokenizer.apply_chat_template([{"role": "user", "content": QUESTIONS[0]}], add_generation_prompt=True,
                                             return_dict=False)  # fmt: skip
        expected = load_tokenizer(GGUF).encode(CHAT.format(QUESTIONS[0])).ids
        with torch.no_grad():
            logits = loaded(torch.tensor([chat])).logits[0].numpy()
        largest = float(abs(logits - transformers_logits(np.array(chat))).max())
        ends = set(loaded.generation_config.eos_token_id)
    print(f"as a directory: {loaded.dtype}, largest difference of logits from those of the file {largest:.1e}; "
          f"{same} of {len(texts)} texts have the program's ids")  # fmt: skip
    right = chat == expected and ends == set(open_gguf(GGUF).generation.eos_ids)
    return right and largest == 0 and same == len(texts)


def agreement_of_program(program: str, file: Path, prompt: list[int], theirs: list[int]) -> int:
    """Of the program's own continuation."""
    return agreement(program_ids(program, file, prompt), theirs)


def agreement_of_reference(scheme: Scheme, prompt: list[int], theirs: list[int]) -> int:
    """What `agreement` is for the reference's own continuation, from one forward pass over theirs."""
    logits = forward(open_gguf(GGUF).config, scheme, np.array(prompt + theirs[:-1]))
    return agreement(logits[len(prompt) - 1 :].argmax(axis=-1).tolist(), theirs)


def compare_greedy() -> dict[str, list[int]]:
    """By variant, how many ids of each continuation agree; for `length`, how many transformers wrote."""
    tokenizer = load_tokenizer(GGUF)
    prompts = [tokenizer.encode(prompt).ids for prompt in TEN]
    theirs = [transformers_greedy(ids) for ids in prompts]
    found = {"length": [len(ids) for ids in theirs]}

    def compare(variant: str, agree: Callable[[list[int], list[int]], int]) -> None:
        found[variant] = [agree(ids, expected) for ids, expected in zip(prompts, theirs, strict=True)]
        print(f"greedy, {variant}: {found[variant]} of {found['length']} ids agree", flush=True)

    compare("fp32", partial(agreement_of_reference, Fp32(open_gguf(GGUF))))
    for reference in SCHEMES.values():
        program = reference.format.program
        for variant in reference.variants:
            file = FILES / f"smollm2.{variant}.bin"
            if not file.is_file():
                continue
            if (ROOT / f"{program}.cpp").is_file():
                compare(variant, partial(agreement_of_program, program, file))
            else:
                compare(variant, partial(agreement_of_reference, reference.read(file)))
    return found


def main() -> int:
    """Exit code 1 if logits, perplexity, chat prompts or the directory are not the same."""
    good = all([check_logits(), check_perplexity(), check_chat(), check_directory()])
    if "--quick" not in sys.argv:
        found = compare_greedy()
        (FILES / "smollm2.agreement.json").write_text(json.dumps(found) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
