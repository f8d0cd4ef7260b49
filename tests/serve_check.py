"""Serves what --hf-out writes by vLLM on the CPUs of this machine, and asks it over HTTP: `make serve-check`.

    python -m tests.serve_check [--only NAME] [--out FOLDER]

Runs by a Python that has vLLM and some modules of .venv, and exports by .venv. Model files, directories, caches
and the servers' logs are in build/serve. For each directory of SERVED:

    chat         a question through the engine's chat template: ids of the prompt are those of the template as jinja2
                 fills it in, and an answer that ends by itself ends with an end token, which is not in its text
    ids          greedy continuations by the engine. Behind each of their prefixes the numpy reference under the
                 engine's arithmetic (tests/served.py) chooses the same id, or the lead of its choice is below a limit;
                 and how many ids the program writes before its first other one
    perplexity   of a text, from the log-probabilities of the engine's prompts, against the same reference
    tokens/s     of one conversation, and of eight at once

Two processes then serve as two nodes, by the commands of docs/serving.md, and are asked the same. Of REFUSED, export
says that vLLM refuses them, and so does vLLM. FAILING are limits of the engine that docs/serving.md names, shown on
models that are not quantized where quantization could be the cause.

`make` runs it in a network namespace of its own, which has nothing but a loopback interface. Servers end with it, also
when it fails or is ended. Exit code 1 if a check fails; the other checks still run.
"""

import argparse
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":
    if missing := [name for name in ("vllm", "openai", "jinja2", "gguf", "ml_dtypes") if find_spec(name) is None]:
        sys.exit(
            f"{sys.executable} has no {', '.join(missing)}. Please type: "
            "make serve-check PYTHON_SERVE=/path/to/python, with one that has (docs/serving.md)"
        )

import jinja2
import numpy as np
import openai

from formats.source import open_model
from golden.awq import AWQ
from golden.forward import forward
from golden.gptq import GPTQ
from golden.perplexity import Logits, encode, load_tokenizer, perplexity, windows
from golden.real import program_guess
from golden.schemes import SCHEMES
from golden.w8a8 import W8A8
from models.smollm2 import documentation
from tests.served import Served, as_runq, unrounded

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "serving.md"
SMOLLM2 = ROOT / "build" / "models" / "smollm2.gguf"
HOST, PORT, KEY = "127.0.0.1", 8000, "a key of this check"
START, ANSWER, STOP = 900, 300, 30  # seconds that a server has to start; to answer; to end
CONTEXT = 256  # tokens of a window of the text; the page's model of 2 heads has 512
N_SCORED = {"tiny-llama": 8000, "tiny-qwen3": 8000, "smollm2": 1024}  # ids of the text
N_NEW, N_SPOKEN, N_AT_ONCE = 60, 64, 8  # ids of an answer; of a timed one; answers at once
PERPLEXITY = 5e-3  # relative
# Lead of the reference's choice over the engine's id, in logits; the share of ids that are its choice. Values of the
# reference are fp32. In bf16 (8 bits) logits of 16 to 32 are multiples of 1/8, and the values before them are rounded;
# in fp32 a code that rounds the other way makes leads, most in tiny models. A misplaced row is behind by many logits.
LEADS = {"float32": 0.3, "float16": 0.3, "bfloat16": 1.0}
SAME = 0.9


CALIBRATION = {"tiny": "--calib models/calibration.txt --seq-len 256",
               "smollm2": f"--calib {SMOLLM2.with_suffix('.txt')} --samples 8 --seq-len 256"}  # fmt: skip
QUESTIONS = {"tiny": ("Tell me a story about a cat.", "Tell me a story about the sea."),
             "smollm2": ("What is the capital of France?", "Explain what a prime number is.")}  # fmt: skip
TEXTS = {"tiny": ("Once upon a time", "One day, a little dog"),
         "smollm2": ("Once upon a time, in a small village by the river,", "def fibonacci(n):\n")}  # fmt: skip
# Model, variant, options of export, dtype (None: as the engine chooses by config.json).
SERVED = (
    ("smollm2", "w8a8", "w8a8", "float32"),
    ("smollm2", "w8a8", "w8a8", None),
    ("smollm2", "gptq", "gptq --bits 4 --group 64", "float16"),
    ("tiny-llama", "w8a8", "w8a8", "float32"),
    ("tiny-qwen3", "w8a8", "w8a8", "float32"),
    ("tiny-llama", "gptq", "gptq --bits 4 --group 64", "float16"),
    ("tiny-qwen3", "gptq", "gptq --bits 4 --group 64", "float16"),
    ("tiny-llama", "w8a8.static", "w8a8 --act static", "float32"),
    ("tiny-qwen3", "awq", "awq --group-size 64", None),
)


# Of a directory that this engine refuses: model, options of export, the words of the engine.
REFUSED = (
    ("tiny-qwen3", "gptq --rtn --bits 4 --group 64 --no-sym", "Unsupported quantization config: bits=4, sym=False"),
    ("tiny-qwen3", "gptq --rtn --bits 8 --group 64", "Marlin does not support weight_bits = uint8b128"),
    ("random-llama", "gptq --no-tokenizer", "(desc_act=True) is no longer supported"),
    ("tiny-qwen3-moe", "moe --no-smooth", "No Int8 MoE backend supports the deployment configuration"),
)
# Of a limit of the engine: directory, options, nodes, the words of its log.
FAILING = (
    ("build/serve/smollm2-w8a8", "--tensor-parallel-size 2", 1, "attention heads (9) must be divisible"),
    ("models/tiny-llama", "--pipeline-parallel-size 2 --enforce-eager", 2, "sync_and_gather_intermediate_tensors"),
)


class CheckError(Exception):
    """What was not as it should be, in one line."""


# ----------------------------------------------------------------------------
# Models


@dataclass
class Model:
    """A model file, the directory beside it, and the reference under the engine's arithmetic.

    name: of the bundled model, or smollm2. variant: its scheme, and what it has besides: w8a8, w8a8.static.
    n_parts: processes that share each matrix; o_proj and down_proj round a part of a token in each.
    """

    name: str
    variant: str
    folder: Path
    n_parts: int = 1

    @property
    def scheme(self) -> str:
        return self.variant.split(".")[0]

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.{self.variant}.bin"

    @property
    def hf_dir(self) -> Path:
        return self.folder / f"{self.name}-{self.variant}"

    @cached_property
    def kind(self) -> str:
        return self.name.split("-")[0]

    @cached_property
    def source(self) -> Path:
        return SMOLLM2 if self.name == "smollm2" else ROOT / "models" / self.name

    @cached_property
    def reference(self) -> Logits:
        """The reference, values in fp32. Activations of W8A8 are rounded by our rule, which is vLLM's."""
        source, scheme = open_model(self.source), AWQ(self.file) if self.scheme == "awq" else None
        if scheme is None:
            model, rounding = (W8A8(self.file), as_runq) if self.scheme == "w8a8" else (GPTQ(self.file), unrounded)
            scheme = Served(model, source, rounding, self.n_parts)
        return partial(forward, source.config, scheme)

    def ids(self, text: str) -> list[int]:
        return load_tokenizer(self.hf_dir).encode(text).ids

    def chat_ids(self, question: str) -> list[int]:
        """The ids of a question, by the directory's own chat template as jinja2 fills it in."""
        fields = json.loads((self.hf_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
        template = jinja2.Environment().from_string(fields["chat_template"])
        message = [{"role": "user", "content": question}]
        text = template.render(messages=message, add_generation_prompt=True, bos_token=fields.get("bos_token"))
        return load_tokenizer(self.hf_dir).encode(text, add_special_tokens=False).ids

    @cached_property
    def eos_ids(self) -> list[int]:
        eos = json.loads((self.hf_dir / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
        return eos if isinstance(eos, list) else [eos]

    def text(self) -> tuple[list[int], int | None]:
        """Ids to score, and the id that begins each window."""
        if self.kind == "tiny":
            text = (ROOT / "models" / "held_out.txt").read_text(encoding="utf-8")
        else:  # not what the calibration had
            text = documentation()
            text = text[len(text) // 2 :]
        ids, bos = encode(self.source, text)
        return ids[: N_SCORED[self.name]], bos


def run_export(name: str, options: str, file: Path, hf_dir: Path) -> str:
    """What `export` says while it writes both, by the page's command. Raises CheckError."""
    source = SMOLLM2 if name == "smollm2" else ROOT / "models" / name
    scheme, *others = options.split()
    command = [ROOT / ".venv" / "bin" / "python", "-m", "export", scheme, source, file, "--quiet", *others]
    done = subprocess.run([*command, "--hf-out", hf_dir], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckError(done.stderr.strip())
    return done.stderr


def export(model: Model) -> None:
    """Writes a model of SERVED, file and directory, unless both are newer than the exporter. Raises CheckError."""
    options = next(o for name, variant, o, _ in SERVED if (name, variant) == (model.name, model.variant))
    sources = [path for folder in ("export", "golden", "formats") for path in (ROOT / folder).glob("*.py")]
    newest = max(path.stat().st_mtime for path in sources)
    if model.hf_dir.is_dir() and min(model.file.stat().st_mtime, model.hf_dir.stat().st_mtime) > newest:
        return
    shutil.rmtree(model.hf_dir, ignore_errors=True)
    said = run_export(model.name, f"{options} {CALIBRATION[model.kind]}", model.file, model.hf_dir)
    print(said, end="", flush=True)


# ----------------------------------------------------------------------------
# Servers


def environment(folder: Path, cores: str) -> dict[str, str]:
    """Of a server: nothing is asked of any hub, all caches are in the folder. cores: those of its workers."""
    caches = {name: str(folder / "cache" / name) for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "HF_HOME")}
    return os.environ | caches | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "VLLM_CPU_INT4_W4A8": "0",  # on a CPU with AMX, activations of 4-bit layers would be int8
        "VLLM_API_KEY": KEY,
    }  # fmt: skip


class Server:
    """A process of the engine and its children: a process group, which `stop` ends."""

    def __init__(self, command: Sequence[str], folder: Path, log: str, cores: str):
        self.log = folder / f"{log}.log"
        vllm = Path(sys.executable).parent / "vllm"
        with self.log.open("wb") as f:
            self._process = subprocess.Popen(
                [vllm, *command], cwd=folder, env=environment(folder, cores), stdin=subprocess.DEVNULL, stdout=f,
                stderr=f, start_new_session=True, preexec_fn=end_with_parent,
            )  # fmt: skip

    def ended(self) -> bool:
        return self._process.poll() is not None

    def dtype(self) -> str:
        """Of values between the products, as the log has it."""
        found = re.search(r"\bdtype=torch\.(\w+)", self.log.read_text(errors="replace"))
        return found[1] if found else "unknown"

    def why(self) -> str:
        """The line of the log that says why the server ended."""
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line for line in lines if re.search(r"\b\w*Error: ", line) and "Engine core init" not in line]
        return (errors or lines or ["no line in its log"])[0].strip()

    def stop(self) -> None:
        """Ends all processes of the group, by force if need be."""
        for number, seconds in ((signal.SIGTERM, STOP), (signal.SIGKILL, STOP)):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            end = time.monotonic() + seconds
            while time.monotonic() < end and group_lives(self._process.pid):
                self._process.poll()
                time.sleep(0.2)
        self._process.wait(STOP)


def group_lives(group: int) -> bool:
    """Whether a process of the group still runs. One that ended may wait for its parent to ask after it."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, of = path.read_text().rsplit(")", 1)[1].split()[:3]
            if int(of) == group and state != "Z":
                return True
    return False


def end_with_parent() -> None:
    """Of a server: SIGTERM when this process is killed, which then ends no server itself (prctl, PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@contextmanager
def serving(commands: Sequence[Sequence[str]], folder: Path, log: str) -> Iterator[list[Server]]:
    """Servers of these commands, one per node; the first answers HTTP. They end with the block. Raises CheckError."""
    n, cores = len(commands), sorted(os.sched_getaffinity(0))
    servers: list[Server] = []
    try:
        for rank, command in enumerate(commands):
            own = cores[rank * len(cores) // n : (rank + 1) * len(cores) // n]
            servers.append(Server(command, folder, f"{log}.{rank}" if n > 1 else log, ",".join(map(str, own))))
        end = time.monotonic() + START
        while not answers():
            for server in servers:
                if server.ended():
                    raise CheckError(f"the server ended: {server.why()} ({server.log})")
            if time.monotonic() > end:
                raise CheckError(f"the server did not start in {START} s ({servers[0].log})")
            time.sleep(1)
        yield servers
    finally:
        for server in servers:
            server.stop()


def answers() -> bool:
    """Whether something listens at the port and calls itself healthy."""
    try:
        with socket.create_connection((HOST, PORT), 5) as s:
            s.sendall(f"GET /health HTTP/1.0\r\nHost: {HOST}\r\n\r\n".encode())
            return s.recv(64).split()[1:2] == [b"200"]
    except OSError:
        return False


def listening() -> list[str]:
    """Where processes of this network namespace listen beyond 127.0.0.1; ports that the system chose have no number."""
    done = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True)
    found = [line.split()[3].rsplit(":", 1) for line in done.stdout.splitlines()]
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = [f"{address}:{port if int(port) < lowest else '(any)'}" for address, port in found]
    return sorted({port for port in ports if not port.startswith(f"{HOST}:")})


# ----------------------------------------------------------------------------
# Questions


class Asker:
    """The engine's OpenAI API as a client sees it. Every request is bounded in tokens and time."""

    def __init__(self):
        self._client = openai.OpenAI(base_url=f"http://{HOST}:{PORT}/v1", api_key=KEY, timeout=ANSWER, max_retries=0)
        self._model = self._client.models.list().data[0].id

    def chat(self, question: str, n: int, **extra: object) -> tuple[list[int], list[int], str, str]:
        """Ids of the prompt, ids of the answer, its text, and why it ended: "stop" or "length". Greedy."""
        done = self._client.chat.completions.create(
            model=self._model, messages=[{"role": "user", "content": question}], temperature=0, max_tokens=n,
            extra_body={"return_token_ids": True, **extra},
        )  # fmt: skip
        choice = done.choices[0]
        return done.prompt_token_ids, choice.token_ids, choice.message.content, choice.finish_reason

    def go_on(self, ids: list[int], n: int) -> list[int]:
        """The greedy continuation of a prompt, up to n ids, an end of the text included."""
        done = self._client.completions.create(
            model=self._model, prompt=ids, temperature=0, max_tokens=n, extra_body={"return_token_ids": True}
        )
        return done.choices[0].token_ids

    def log_likelihoods(self, ids: list[int]) -> np.ndarray:
        """log p of ids[1:], (n - 1,) fp64, as the engine computes it for a prompt."""
        done = self._client.completions.create(
            model=self._model, prompt=ids, temperature=0, max_tokens=1, extra_body={"prompt_logprobs": 0}
        )
        found = done.choices[0].prompt_logprobs
        return np.array([found[i][str(ids[i])]["logprob"] for i in range(1, len(ids))])

    def refuses_strangers(self) -> bool:
        """Whether a client without the key is turned away."""
        try:
            self._client.with_options(api_key="another key").models.list()
        except openai.AuthenticationError:
            return True
        return False


# ----------------------------------------------------------------------------
# Checks


@dataclass
class Row:
    """What was found of one way to serve: cells of the table, and what was wrong."""

    title: str
    cells: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    answer: str = ""


def check_chat(model: Model, ask: Asker, row: Row) -> None:
    """Template, answer, end."""
    for question in QUESTIONS[model.kind]:
        prompt, ids, text, reason = ask.chat(question, N_NEW)
        if prompt != model.chat_ids(question):
            row.wrong.append(f"{question!r}: the engine's prompt has other ids than the template")
        if reason not in ("stop", "length") or (reason == "stop") != (ids[-1] in model.eos_ids):
            row.wrong.append(f"{question!r}: ended by {reason!r} with id {ids[-1]}")
        tokenizer = load_tokenizer(model.hf_dir)
        if not text.strip() or text.strip() != tokenizer.decode(ids, skip_special_tokens=True).strip():
            row.wrong.append(f"{question!r}: its text {text!r} is not that of its ids")
        row.answer = row.answer or text
        row.cells["ended"] = f"{row.cells.get('ended', '')} {reason}".strip()


def check_ids(model: Model, ask: Asker, dtype: str, row: Row) -> None:
    """Greedy ids: behind each prefix what the reference chooses, up to leads."""
    limit = LEADS[dtype]
    same = n = alike = 0
    largest = 0.0
    prompts = [model.chat_ids(q) for q in QUESTIONS[model.kind]] + [model.ids(text) for text in TEXTS[model.kind]]
    for prompt in prompts:
        new = ask.go_on(prompt, N_NEW)
        rows = model.reference(np.array(prompt + new[:-1]))[len(prompt) - 1 :]
        leads = rows.max(axis=1) - rows[np.arange(len(new)), new]
        same, n, largest = same + int((leads == 0).sum()), n + len(new), max(largest, float(leads.max()))
        if model.scheme != "awq":  # whose program is emulated on a CPU
            ours = program_guess(SCHEMES[model.scheme], model.file)(prompt, N_NEW)
            pairs = enumerate(zip(ours, new, strict=False))
            alike += next((i for i, (a, b) in pairs if a != b), min(len(ours), len(new)))
    row.cells["ids"] = f"{same} of {n}"
    row.cells["largest lead"] = f"{largest:.3f}"
    row.cells["program"] = f"{alike}" if alike else "-"
    if largest > limit:
        row.wrong.append(f"an id behind the reference's choice by {largest:.3f}, allowed {limit}")
    if same < SAME * n:
        row.wrong.append(f"{same} of {n} ids are the reference's")


def check_perplexity(model: Model, ask: Asker, row: Row) -> None:
    """Of the same windows, by the engine and by the reference."""
    ids, bos = model.text()
    found = [ask.log_likelihoods(w.tolist()) for w in windows(ids, bos, CONTEXT) if len(w) > 1]
    theirs = float(np.exp(-np.concatenate(found).mean()))
    ours, _ = perplexity(model.reference, ids, bos, CONTEXT)
    off = theirs / ours - 1
    row.cells["perplexity"] = f"{theirs:.5f} ({ours:.5f}, {100 * off:+.3f} %)"
    if abs(off) > PERPLEXITY:
        row.wrong.append(f"perplexity {theirs:.5f}, the reference says {ours:.5f}: {100 * off:+.2f} %")


def measure_speed(model: Model, ask: Asker, row: Row) -> None:
    """Tokens/s of one conversation and of several at once; a first one, which is not counted, warms up."""
    question = QUESTIONS[model.kind][0]
    cells = []
    for n in (1, 1, N_AT_ONCE):
        start = time.monotonic()
        with ThreadPoolExecutor(n) as pool:
            asked = [pool.submit(ask.chat, question, N_SPOKEN, ignore_eos=True) for _ in range(n)]
            lengths = [len(one.result()[1]) for one in asked]
        cells.append(f"{sum(lengths) / (time.monotonic() - start):.0f}")
        if lengths != [N_SPOKEN] * n:
            row.wrong.append(f"{n} at once: answers of {lengths} ids, not {N_SPOKEN}")
    row.cells["tokens/s"] = f"{cells[1]}, {cells[2]}"


def check(row: Row, model: Model, commands: Sequence[Sequence[str]], folder: Path) -> Row:
    """All checks of one way to serve; what goes wrong is in the row."""
    try:
        export(model)
        start = time.monotonic()
        with serving(commands, folder, f"{model.hf_dir.name}-{len(commands)}") as servers:
            dtype = servers[0].dtype()
            row.cells["values"] = dtype
            row.cells["started"] = f"{time.monotonic() - start:.0f} s"
            ask = Asker()
            if not ask.refuses_strangers():
                row.wrong.append("a client without the key is answered")
            row.cells["listens beyond 127.0.0.1"] = " ".join(listening()) or "nowhere"
            check_chat(model, ask, row)
            check_ids(model, ask, dtype, row)
            check_perplexity(model, ask, row)
            measure_speed(model, ask, row)
    except (CheckError, openai.OpenAIError, OSError, ValueError, subprocess.SubprocessError) as error:
        row.wrong.append(str(error))
    return told(row)


def told(row: Row) -> Row:
    """The row, printed: the table comes last, and a check takes minutes."""
    print(f"{row.title}: {row.cells}", *row.wrong, sep="\n    ", flush=True)
    return row


# ----------------------------------------------------------------------------
# Ways to serve


def check_two_nodes(folder: Path, only: str) -> list[Row]:
    """Two processes by the commands of the page, a pair for each of its blocks."""
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    rows = []
    for block in re.findall(r"^```sh\n((?:vllm serve .*--master-addr 127\.0\.0\.1.*\n)+)```$", text, re.M):
        commands = [line.split()[1:] for line in block.splitlines()]
        directory, options = commands[0][1], commands[0]
        how = next(option for option in options if option.endswith("-parallel-size")).removeprefix("--").split("-")[0]
        if only in directory + "-nodes":
            model = Model(*directory.rsplit("-", 1), folder, n_parts=2 if how == "tensor" else 1)
            row = Row(f"`{directory}`, two nodes, {how} parallel")
            rows.append(check(row, model, commands, folder))
    return rows


def check_fails(row: Row, commands: Sequence[Sequence[str]], folder: Path, log: str, words: str) -> None:
    """That the engine does not serve, for a reason that its log gives in these words."""
    served = False
    try:
        with serving(commands, folder, log):
            Asker().go_on([1, 2, 3], 4)
            served = True
    except (CheckError, openai.OpenAIError):
        pass
    row.cells["vLLM"] = "serves" if served else f"`{words}`"
    logs = "".join(path.read_text(errors="replace") for path in folder.glob(f"{log}*.log"))
    if served or words not in logs:
        row.wrong.append("vLLM serves it" if served else f"{words!r} is not in {folder / log}.log")


def check_refused(folder: Path) -> list[Row]:
    """Directories that this engine does not load: export says so, and so does the engine."""
    rows = []
    for i, (name, options, words) in enumerate(REFUSED):
        row, log = Row(f"`{name}`, `{options}`"), f"refused-{i}"
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            try:
                said = run_export(name, options, Path(temporary) / "m.bin", Path(temporary) / "hf")
                found = re.search(r"^export: warning: --hf-out: (.*vLLM.*)$", said, re.M)
                row.cells["export"] = found[1] if found else "nothing"
                if not found:
                    row.wrong.append("export writes it without a word")
                check_fails(row, [["serve", f"{temporary}/hf", "--host", HOST]], folder, log, words)
            except CheckError as error:
                row.wrong.append(str(error))
        rows.append(told(row))
    return rows


def check_failing(folder: Path) -> list[Row]:
    """Limits of the engine itself."""
    export(Model("smollm2", "w8a8", folder))
    nodes = f"--nnodes 2 --master-addr {HOST} --node-rank"
    rows = []
    for i, (directory, options, n_nodes, words) in enumerate(FAILING):
        command = ["serve", str(ROOT / directory), *options.split(), "--host", HOST]
        others = [[*nodes.split(), "0"], [*nodes.split(), "1", "--headless"]] if n_nodes == 2 else [[]]
        row = Row(f"`{directory}`, `{options}`{', two nodes' if n_nodes == 2 else ''}")
        check_fails(row, [[*command, *other] for other in others], folder, f"failing-{i}", words)
        rows.append(told(row))
    return rows


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The rows as Markdown, a column for each cell."""
    columns = list(dict.fromkeys(name for row in rows for name in row.cells))
    yield "| " + " | ".join(["", *columns]) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for row in rows:
        yield "| " + " | ".join([row.title, *(row.cells.get(name, "-") for name in columns)]) + " |"


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.serve_check")
    parser.add_argument(
        "--only", default="", metavar="NAME", help="what has this in its name: smollm2, nodes, refused, failing"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "serve", metavar="FOLDER")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # servers end with the blocks that they are in
    args.out.mkdir(parents=True, exist_ok=True)
    parts: list[list[Row]] = [[], [], [], []]
    for name, variant, _, dtype in SERVED:
        model = Model(name, variant, args.out)
        if args.only in f"{model.hf_dir.name}, {dtype}":
            command = ["serve", model.hf_dir.name, "--host", HOST, *(["--dtype", dtype] if dtype else [])]
            parts[0].append(check(Row(f"`{model.hf_dir.name}`"), model, [command], args.out))
    parts[1] = check_two_nodes(args.out, args.only)
    if args.only in "refused":
        parts[2] = check_refused(args.out)
    if args.only in "failing":
        parts[3] = check_failing(args.out)
    for rows in filter(None, parts):
        print("", *table(rows), sep="\n")
        for row in rows:
            print(f"{row.title}: {row.answer!r}" if row.answer else "", end="\n" if row.answer else "")
    wrong = [f"{row.title}: {what}" for rows in parts for row in rows for what in row.wrong]
    print("", *(wrong or ["all as it should be"]), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
