"""What the page shows besides traces, as one JSON file, and the models that it runs: python -m web.page_data build/web

Everything comes from where it is kept: lines of the programs from their sources, equations from docs/, the meaning of
words from the glossary, offsets of tensors from the exporter's reader, tolerances from golden/trace.py, texts of
tokens from the tokenizers. Here are only the sentences that guide a visitor, one for each step.
"""

import gzip
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from export.tokenizer import byte_alphabet
from formats.errors import ModelError
from formats.files import replacing
from formats.gptq import KINDS, GptqLayout
from formats.model_file import FileHeader, read_header
from formats.schemes import FORMATS
from formats.source import open_model
from formats.tensors import matrix_shapes, with_offsets
from golden import trace
from golden.channel_scaling import PLACE_READ_BY
from golden.forward import load_weight
from golden.q8 import quantize

ROOT = Path(__file__).resolve().parent.parent


# ----------------------------------------------------------------------------
# Steps: by the names that traces give them, without `layers.N.`


@dataclass(frozen=True)
class Guide:
    """What a visitor reads at a step. In `text`, [[word]] is a word of the glossary of docs/README.md."""

    title: str
    text: str
    page: str  # in docs/, with the section that has the equation in its first block of text
    equation: str = ""  # how the lines of that block begin, divided by |; none if empty


_QUANTIZE = (
    "Each [[group]] of numbers is written as whole numbers from −127 to 127, its [[code]]s, times one number that they "
    "share, its [[scale]]. The largest of the group gets 127 or −127."
)
_PRODUCT = (
    "Codes times codes, added up as whole numbers: one exact sum per [[group]], its [[accumulator]]. "
    "Two [[scale]]s turn each sum back into a number. "
)
_FORWARD, _MOE = "forward-pass.md", "moe.md"

GUIDES = {
    "tokens": Guide(
        "Tokens", "The text is cut into [[token]]s. Each is a number in the model's vocabulary.",
        f"{_FORWARD}#1-embedding",
    ),
    "embed": Guide(
        "Embedding",
        "The token's number picks a row of a table. From here on the token is a list of numbers, the residual stream: "
        "layers read it and add to it.",
        f"{_FORWARD}#1-embedding", "x =",
    ),
    "rotate": Guide(
        "Rotate",
        "The numbers are mixed with one another, so that in the layers none stands out and makes the [[scale]] of its "
        "[[group]] large. The layers' matrices were rotated to match; only rounding changes.",
        "gptq.md#rotation",
    ),
    "attn.norm": Guide(
        "Normalize",
        "Each number is divided by the typical size of all of them and multiplied by a learned weight, so that "
        "the layer reads lists of equal size.",
        f"{_FORWARD}#2-rmsnorm", "normed",
    ),
    "attn.norm.q": Guide("Quantize", _QUANTIZE, f"{_FORWARD}#3-quantize", "scale|code"),
    "attn.q_proj": Guide(
        "Query", _PRODUCT + "The query says what this token looks for.",
        f"{_FORWARD}#4-queries-keys-values", "q =",
    ),
    "attn.k_proj": Guide(
        "Key", "The same product with another matrix. The key says what this token has to offer to those behind it.",
        f"{_FORWARD}#4-queries-keys-values", "k =",
    ),
    "attn.v_proj": Guide(
        "Value", "A third matrix. The value is what this token hands over to those that look at it.",
        f"{_FORWARD}#4-queries-keys-values", "v =",
    ),
    "attn.q_norm": Guide(
        "Normalize queries", "Each head of the query is normalized on its own.",
        f"{_FORWARD}#2-rmsnorm", "normed",
    ),
    "attn.k_norm": Guide(
        "Normalize keys", "Each head of the key is normalized on its own.", f"{_FORWARD}#2-rmsnorm", "normed",
    ),
    "attn.q_rope": Guide(
        "Rotate the query",
        "Two neighbours are the tip of an arrow, which is turned by an angle that grows with the token's place in the "
        "text. So queries and keys can tell how far apart they are.",
        f"{_FORWARD}#6-rope", "angle|a'|b'",
    ),
    "attn.k_rope": Guide(
        "Rotate the key", "The key is turned like the query, by the angle of its own place.",
        f"{_FORWARD}#6-rope", "angle|a'|b'",
    ),
    "attn.scores": Guide(
        "Compare",
        "The query times the key of every token so far, in several heads that each look for something of their own. "
        "A large score says: look there.",
        f"{_FORWARD}#8-attention", "scores",
    ),
    "attn.probs": Guide(
        "Share out", "Softmax makes shares of the scores: all positive, together 1. This is whom the token looks at.",
        f"{_FORWARD}#8-attention", "probs",
    ),
    "attn.mix": Guide(
        "Mix", "The values of all tokens so far are added up, each times its share.",
        f"{_FORWARD}#8-attention", "attn_out",
    ),
    "attn.mix.q": Guide("Quantize", _QUANTIZE, f"{_FORWARD}#3-quantize", "scale|code"),
    "attn.o_proj": Guide(
        "Output", _PRODUCT + "This matrix mixes what the heads have found.",
        f"{_FORWARD}#9-back-to-the-residual-stream", "x =",
    ),
    "attn.residual": Guide(
        "Add", "What attention found is added to the residual stream, number by number. A layer never overwrites.",
        f"{_FORWARD}#9-back-to-the-residual-stream", "x =",
    ),
    "ffn.norm": Guide(
        "Normalize", "As before attention, with other weights. From here each token is on its own.",
        f"{_FORWARD}#10-feed-forward", "normed",
    ),
    "ffn.norm.q": Guide("Quantize", _QUANTIZE, f"{_FORWARD}#3-quantize", "scale|code"),
    "ffn.gate_proj": Guide(
        "Gate", _PRODUCT + "The list gets longer: each of these numbers will open or close a gate.",
        f"{_FORWARD}#10-feed-forward", "hidden",
    ),
    "ffn.up_proj": Guide(
        "Up", "The same product with another matrix: what goes through the gates.",
        f"{_FORWARD}#10-feed-forward", "hidden",
    ),
    "ffn.swiglu": Guide(
        "Gate times up", "Silu bends the gate: far below zero it is shut, above zero it is open. Then gate times up.",
        f"{_FORWARD}#10-feed-forward", "hidden",
    ),
    "ffn.swiglu.q": Guide("Quantize", _QUANTIZE, f"{_FORWARD}#3-quantize", "scale|code"),
    "ffn.down_proj": Guide(
        "Down", _PRODUCT + "This matrix brings the list back to its first length.",
        f"{_FORWARD}#10-feed-forward", "x ",
    ),
    "moe.router": Guide(
        "Ask the router", "A small matrix gives each expert a score: how well it suits this token.",
        f"{_MOE}#a-layer", "logits",
    ),
    "moe.experts": Guide(
        "Choose experts", "The experts with the largest scores get the token. The others do nothing for it.",
        f"{_MOE}#a-layer", "experts",
    ),
    "moe.weights": Guide(
        "Weigh experts", "Softmax says how much each of the chosen counts.",
        f"{_MOE}#a-layer", "weights",
    ),
    "moe.gate_up_proj": Guide(
        "Gate and up", _PRODUCT + "Each chosen expert has a matrix of its own for it.",
        f"{_MOE}#a-layer", "y_e",
    ),
    "moe.swiglu": Guide(
        "Gate times up", "Silu bends the first half, which opens or shuts the gates for the second.",
        f"{_MOE}#a-layer", "y_e",
    ),
    "moe.swiglu.q": Guide("Quantize", _QUANTIZE, f"{_FORWARD}#3-quantize", "scale|code"),
    "moe.down_proj": Guide(
        "Down", _PRODUCT + "Each expert brings its list back to the first length.",
        f"{_MOE}#a-layer", "y_e",
    ),
    "moe.mix": Guide(
        "Mix experts", "What the experts say is added up, each times its weight.",
        f"{_MOE}#a-layer", "out",
    ),
    "ffn.residual": Guide(
        "Add", "The result is added to the residual stream. The next layer starts from here.",
        f"{_FORWARD}#10-feed-forward", "x ",
    ),
    "rotate_back": Guide(
        "Rotate back", "The last matrix is the embedding's table, which was not rotated. So the numbers go back.",
        "gptq.md#rotation",
    ),
    "norm": Guide("Last norm", "The stream is normalized once more.", f"{_FORWARD}#2-rmsnorm", "normed"),
    "norm.q": Guide("Quantize", _QUANTIZE, f"{_FORWARD}#3-quantize", "scale|code"),
    "logits": Guide(
        "Logits",
        "A last product gives every token of the vocabulary a score: how well it would come next. Temperature "
        "and top-p say how the next token is drawn.",
        f"{_FORWARD}#11-logits", "logits",
    ),
}  # fmt: skip


def section_of(page: str) -> str:
    """The text of a section of a page, given as `PAGE.md#anchor`, up to the next heading. Raises KeyError."""
    name, _, anchor = page.partition("#")
    lines = (ROOT / "docs" / name).read_text(encoding="utf-8").split("\n")
    found: list[str] | None = None
    for line in lines:
        if line.startswith("#"):
            if found is not None:
                break
            slug = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower()).replace(" ", "-")
            found = [] if slug == anchor else None
        elif found is not None:
            found.append(line)
    if found is None:
        raise KeyError(page)
    return "\n".join(found)


def equations(guide: Guide) -> list[str]:
    """The lines of a section's first equation block that begin as the guide says, without the remarks behind them."""
    if not guide.equation:
        return []
    block = re.search(r"^```text\n(.*?)\n```", section_of(guide.page), re.DOTALL | re.MULTILINE)
    if block is None:
        raise KeyError(f"{guide.page} has no equations")
    lines = [re.sub(r"^(\S+) +=", r"\1 =", line) for line in block[1].split("\n")]
    found = [re.split(r" {4,}", line)[0] for line in lines if line.startswith(tuple(guide.equation.split("|")))]
    if not found:
        raise KeyError(f"{guide.page} has no equation {guide.equation!r}")
    return found


def glossary() -> dict[str, str]:
    """What words mean, from the table of docs/README.md."""
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    table = text[text.index("| word | meaning |") :].split("\n\n")[0]
    words = {}
    for row in table.strip().split("\n")[2:]:
        names, meaning = (cell.strip() for cell in row.strip("|").split("|", 1))
        meaning = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", meaning).replace("`", "").replace("*", "")
        words |= {name.strip(): meaning for name in names.split(",")}
    return words


# ----------------------------------------------------------------------------
# Places on the page (web/page/url.js), to which the book links


# What each product of a layer reads, by step names.
INPUT = PLACE_READ_BY | {"moe.gate_up_proj": "ffn.norm", "moe.down_proj": "moe.swiglu"}
_PRODUCT_AT, _CODES_AT = "walk?step=layers.0.attn.q_proj&cell=0", "walk?step=layers.0.attn.norm.q&cell=0"
WORD_PLACES = {
    "token": "walk?step=tokens",
    "row": _PRODUCT_AT,
    "code": _CODES_AT,
    "scale": _CODES_AT,
    "group": _CODES_AT,
    "zero point": "walk?model=gptq&step=layers.0.attn.q_proj&cell=0",
    "accumulator": _PRODUCT_AT,
    "place": "walk?step=layers.0.attn.norm.q&map=1",
    "attention block": "walk?step=layers.0.attn.norm&map=1",
    "prefill": "walk?step=tokens",
    "step": "walk?step=layers.0.attn.norm&map=1",
    "trace": "port",
    "MAC": _PRODUCT_AT,
    "classifier": "walk?step=logits&cell=0",
    "KV cache": "walk?step=layers.1.attn.scores&map=1",
}
# Sections of docs/forward-pass.md that name no step.
SECTION_PLACES = {
    "7-kv-cache": WORD_PLACES["KV cache"],
    "12-sampling": "walk?step=logits&temperature=2",
    "13-prefill-and-decode": WORD_PLACES["prefill"],
}


def step_place(step: str) -> str:
    """The place of a step of GUIDES, in the first model and layer that have it; of products and codes, a number."""
    model = {"moe": "model=moe&", "attn.q_norm": "model=qwen3&", "attn.k_norm": "model=qwen3&"}
    is_inside = step.startswith(("attn.", "ffn.", "moe."))
    layer = "layers.1." if step.startswith("moe.") else "layers.0." if is_inside else ""
    cell = "&cell=0" if step in INPUT or step.endswith(".q") or step == "logits" else ""
    return f"walk?{model.get(step, model.get(step.split('.')[0], ''))}step={layer}{step}{cell}"


def places() -> dict[str, dict[str, str]]:
    """Places of steps, by the names that pages give them (NAME.s is where NAME.q is), of words, of sections."""
    steps = {step: step_place(step) for step, guide in GUIDES.items() if guide.page.startswith((_FORWARD, _MOE))}
    steps |= {f"{name[:-2]}.s": at for name, at in steps.items() if name.endswith(".q")}
    return {"steps": steps, "words": WORD_PLACES, "sections": SECTION_PLACES}


# ----------------------------------------------------------------------------
# Lines of the programs

# What has codes and scales, in all programs.
QUANTIZED = {"s.xq", "s.expert_hidden", "s.int8.q", "s.int8.k", "s.int8.v"}


def steps_of(source: str) -> dict[str, dict[str, object]]:
    """Name of each step that forward() records -> the statement that computes it.

    The statement is {"first": number of its first line, "lines": its lines without what records it, "mark": which of
    them is about this step}. Codes and scales are the step NAME.q.
    """
    lines = source.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("// The forward pass"))
    statements: list[tuple[int, list[str]]] = []  # index of the first line, lines
    is_open = False
    found: dict[str, dict[str, object]] = {}

    def keep(name: str, value: str) -> None:
        mentions = [s for s in statements if any(re.search(rf"{re.escape(value)}\b", line) for line in s[1])]
        first, text = (mentions or statements)[-1]
        marks = [i for i, line in enumerate(text) if f"{{{value}," in line]
        if name not in found:
            indent = min(len(line) - len(line.lstrip()) for line in text)
            lines_shown = [re.sub(r"\s{3,}//", "  //", line[indent:].rstrip()) for line in text]
            found[name] = {"first": first + 1, "lines": lines_shown, "mark": marks[0] if marks else 0}

    for i in range(start, len(lines)):
        if "clang-format on" in lines[i]:
            break
        code = re.split(r"record\(\"", lines[i])[0].rstrip()
        bare = code.split("//")[0].strip()
        if bare:
            if is_open:
                statements[-1][1].append(code)
            else:
                statements.append((i, [code]))
            is_open = bare[-1] not in ";{}"
        for name, value in re.findall(r'record\("([\w.]+)",\s*([\w.]+)', lines[i]):
            is_codes = value in QUANTIZED
            keep(name + ".q" if is_codes else name, value)
        if handed := re.search(r'record, "([\w.]+)"\)', lines[i]):  # to runq_gptq's quantize, which records
            keep(handed[1] + ".q", "quantize")
    return found


def function(source: str, start: str) -> dict[str, object]:
    """The function whose first line begins with `start`: {"first": its line's number, "lines": its lines}."""
    lines = source.split("\n")
    first = next(i for i, line in enumerate(lines) if line.removeprefix("inline ").startswith(start))
    last = next(i for i in range(first, len(lines)) if lines[i].startswith("}"))
    return {"first": first + 1, "lines": lines[first : last + 1]}


@dataclass(frozen=True)
class Program:
    """A program and its functions that the page shows beside a number: of codes, of a sum."""

    quantize: str
    dot: str


PROGRAMS = {
    "runq": Program("float quantize_group(", "void dot("),
    "runq_w8a8": Program(
        "float quantize_group(int8_t* codes, const float* x, int n, const float* static_scale =", "void dot("
    ),
    "runq_gptq": Program("float quantize_group(", "void dot("),
    "runq_moe": Program("float quantize_group(", "float dot("),
}


def program_data(name: str, program: Program) -> dict[str, object]:
    """A program's source, the lines of its steps, and the functions that the page shows."""
    source = (ROOT / f"{name}.cpp").read_text(encoding="utf-8")
    functions = {"quantize": function(source, program.quantize), "dot": function(source, program.dot)}
    return {"source": f"{name}.cpp", "steps": steps_of(source), "functions": functions}


# ----------------------------------------------------------------------------
# Models


@dataclass(frozen=True)
class Choice:
    """A model that a visitor can choose."""

    title: str
    scheme: str
    model: str  # of models/
    variant: str  # of build/models/MODEL.VARIANT.bin
    brief: str  # under its name
    text: str
    prompt: str


CHOICES = {
    "q8": Choice(
        "Q8", "q8", "tiny-llama", "q8", "8 bits, groups of 64",
        "Weights and activations in 8 bits; 64 of them share a scale.", "Once upon a time",
    ),
    "w8a8": Choice(
        "W8A8", "w8a8", "tiny-llama", "w8a8", "8 bits, a scale per row",
        "8 bits, one scale for a whole row. Large channels were made smaller beforehand (SmoothQuant).",
        "Once upon a time",
    ),
    "rotated": Choice(
        "W8A8, rotated", "w8a8", "tiny-llama", "w8a8-rotate", "8 bits, numbers mixed",
        "W8A8 of which a rotation (QuaRot) spreads what stands out over all of a token's numbers.", "Once upon a time",
    ),
    "gptq": Choice(
        "GPTQ", "gptq", "tiny-llama", "gptq-ladder", "8, 4 and 2 bits",
        "A ladder of 8, 4 and 2 bits: fewer where it hurts least. Activations as in Q8.", "Once upon a time",
    ),
    "moe": Choice(
        "MoE", "moe", "tiny-qwen3-moe", "moe-a8w8", "8 bits, eight experts",
        "Another model, with eight experts in a layer of which each token asks two. 8 bits, one scale for a row.",
        "Once upon a time",
    ),
    "qwen3": Choice(
        "Q8, Qwen3", "q8", "tiny-qwen3", "q8", "8 bits, another model",
        "The same as Q8 for a model of another family, which normalizes queries and keys.", "Once upon a time",
    ),
}  # fmt: skip


def model_path(choice: Choice) -> Path:
    """Its file, as `make` exports it."""
    return ROOT / "build" / "models" / f"{choice.model}.{choice.variant}.bin"


def layout_data(head: FileHeader) -> dict[str, object]:
    """How a scheme's own fields say that matrices are stored."""
    if isinstance(head.layout, GptqLayout):
        names = ("bits", "group", "sparse", "two_level", "int8_scales")
        formats = [dict(zip(names, form, strict=True)) for form in head.layout.formats]
        return {"formats": dict(zip(KINDS, formats, strict=True)), "has_order": head.layout.has_order}
    return {} if head.layout is None else {"experts": head.layout._asdict()}


def model_data(choice: Choice) -> dict[str, object]:
    """What the page says of a model, and where its tensors lie: name -> type, shape, offset."""
    path = model_path(choice)
    file_format = FORMATS[choice.scheme]
    head = read_header(path, file_format)
    c = head.config
    tensors = with_offsets(head.tensors(), alignment=file_format.alignment)
    return {
        "title": choice.title,
        "brief": choice.brief,
        "text": choice.text,
        "prompt": choice.prompt,
        "scheme": choice.scheme,
        "model": choice.model,
        "program": file_format.program,
        "file": f"models/{path.name}.gz",
        "bytes": path.stat().st_size,
        "group_size": head.group_size,
        "eps": c.norm_eps,
        "n_layers": c.n_layers,
        "n_heads": c.n_heads,
        "n_kv_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "classifier": "embed" if c.tied else "classifier",
        "layout": layout_data(head),
        "tensors": {t.name: [t.dtype, list(t.shape), t.offset] for t in tensors},
    }


# ----------------------------------------------------------------------------
# One matrix in fewer bits: in the Q8 file it lies in codes of a smaller range, so that the program runs it as it is

BITS = (7, 6, 5, 4, 3, 2)
BITS_OF = "q8"  # of CHOICES


def matrices_in_bits(choice: Choice) -> dict[str, bytes]:
    """Name of each matrix of the layers -> for each of BITS its int8 codes and then its fp32 scales, as in the file."""
    head = read_header(model_path(choice), FORMATS[choice.scheme])
    checkpoint = open_model(ROOT / "models" / choice.model)
    parts: dict[str, bytes] = {}
    for name, _ in matrix_shapes(head.config):
        if name.startswith("layers."):
            weight = load_weight(checkpoint, name, interleaved=True)
            found = [quantize(weight, head.group_size, bits) for bits in BITS]
            parts[name] = b"".join(q.codes.tobytes() + q.scales.tobytes() for q in found)
    return parts


# ----------------------------------------------------------------------------
# Programs with a mistake: web/variants/


# What they and the right program run on. " young" and " wizard" have values in layer 0 that lie in the very middle of
# two codes, so that the way of rounding shows.
VARIANT_PROMPT = "Once upon a time, there was a young wizard"


def variant_data(path: Path) -> dict[str, object]:
    """One of them as the page shows it. The mistake is in the program's source, or in the model file."""
    said = json.loads(path.read_text(encoding="utf-8"))
    choice = next(name for name, c in CHOICES.items() if f"{c.model}.{c.variant}" == said["model"])
    mistakes = [edit for edit in said["edits"] if "scaffold" not in edit]
    lines = [mark + line for edit in mistakes for mark, side in (("-", "old"), ("+", "new")) for line in edit[side]]
    source = ", ".join(sorted({edit["file"] for edit in mistakes}))
    if "export" in said:
        source = "how the model file is made"
        scheme = said["export"][0]
        model = CHOICES[choice].model
        lines = [
            f"-python -m export {scheme} models/{model}",
            f"+python -m export {' '.join(said['export'])} models/{model}",
        ]
    title, why = (re.sub(r"(?<!\w)-(?=\d)", "−", said[part]) for part in ("title", "why"))
    return {
        "title": title,
        "text": why,
        "program": said["program"] if "export" in said else f"variants/{path.stem}",
        "file": f"variants/{path.stem}.bin" if "export" in said else None,
        "model": choice,
        "prompt": VARIANT_PROMPT,
        "source": source,
        "diff": lines,
        "others": [edit["scaffold"] for edit in said["edits"] if "scaffold" in edit],
        "step": said["first_difference"],
    }


def vocabulary(model: str) -> list[str]:
    """The text of every token; of one whose bytes are no text of their own, each byte as <0xD7>."""
    tokenizer = Tokenizer.from_file(str(ROOT / "models" / model / "tokenizer.json"))
    alphabet = byte_alphabet()

    def text(i: int) -> str:
        said = tokenizer.decode([i], skip_special_tokens=False)
        return "".join(f"<0x{alphabet[c]:02X}>" for c in tokenizer.id_to_token(i)) if "\ufffd" in said else said

    return [text(i) for i in range(tokenizer.get_vocab_size())]


# ----------------------------------------------------------------------------


def contract() -> dict[str, object]:
    """What `golden diff` judges by, and what each product reads."""
    return {
        "op": trace.OP_TOLERANCE,
        "half": trace.HALF_TOLERANCE,
        "half_mix": trace.HALF_MIX_TOLERANCE,
        "half_pass": trace.HALF_PASS_TOLERANCE,
        "cached": trace.CACHED,
        "order": trace._ORDER,
        "inputs": INPUT,
    }


def page_data() -> dict[str, object]:
    """All of it."""
    steps = {
        name: {"title": g.title, "text": g.text, "page": g.page, "equations": equations(g)}
        for name, g in GUIDES.items()
    }
    return {
        "steps": steps,
        "words": glossary(),
        "places": places(),
        "programs": {name: program_data(name, program) for name, program in PROGRAMS.items()},
        "models": {name: model_data(choice) for name, choice in CHOICES.items()},
        "vocabularies": {model: vocabulary(model) for model in sorted({c.model for c in CHOICES.values()})},
        "bits": {"model": BITS_OF, "all": BITS},
        "contract": contract(),
        "variants": {path.stem: variant_data(path) for path in sorted((ROOT / "web" / "variants").glob("*.json"))},
        "magics": {f.magic: f.program for f in FORMATS.values() if f.program in PROGRAMS},
    }


def main(argv: list[str]) -> int:
    """Writes data.json and the model files into the folder that the command line names."""
    if len(argv) != 1:
        print("usage: python -m web.page_data FOLDER", file=sys.stderr)
        return 2
    folder = Path(argv[0])
    try:
        data = page_data()
        (folder / "models").mkdir(parents=True, exist_ok=True)
        for choice in CHOICES.values():
            packed = gzip.compress(model_path(choice).read_bytes(), mtime=0)
            (folder / "models" / f"{model_path(choice).name}.gz").write_bytes(packed)
        (folder / "bits").mkdir(exist_ok=True)
        for name, parts in matrices_in_bits(CHOICES[BITS_OF]).items():
            (folder / "bits" / f"{name}.gz").write_bytes(gzip.compress(parts, mtime=0))
        with replacing(folder / "data.json") as f:
            f.write(json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode())
    except (ModelError, OSError) as error:
        print(f"web.page_data: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
