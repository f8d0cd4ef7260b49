"""The programs as one file each, compiled without -DENGINE: goldens, the engine's results, mistakes, damaged files.

They are in build/plain, and in build/plain-asan with AddressSanitizer and UBSan (mk/build.mk).
"""

import json
import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from formats.schemes import FORMATS
from golden.trace import compare, read_trace
from tests.helpers import FULL, ROOT
from tests.test_broken_files import RUN, broken_copies
from tests.test_rotation import export_rotated
from tests.test_runq import BIN, MODELS, N_STEPS, RANDOM, generations, golden_json, program_of

# Lines of a program at most, and the part of them behind which its forward pass has ended. A change that needs more has
# to say why. runq_moe: 200 more than without the ladder, of which 200 are runq_gptq's sections, for A8W4, too. All but
# runq_awq: 45 for rotated models, which are a section of 32, two calls and a field of the header. runq_gptq and
# runq_moe: 27 for nl4, 5 and 6 bits. runq_awq: 12 for a tile that suits the product, 16 for RoPE's angles, which over
# the engine are this table, too (52 lines less there). Each: 75 for a fused multiply-add, an exponential and --digest,
# which make all forms equal to the bit.
LIMITS = {"runq": (1570, 865 / 1570), "runq_w8a8": (1720, 0.6), "runq_gptq": (1845, 0.6), "runq_moe": (2400, 0.6),
          "runq_awq": (2670, 0.5)}  # fmt: skip
SOURCE = {path.stem: path for path in ROOT.glob("runq*.c*")}
WHOLE = [name for name in LIMITS if re.search(r"^#if(n?def| ?!?defined\(?) ?ENGINE\b", SOURCE[name].read_text(), re.M)]
PROGRAMS = [name for name in WHOLE if SOURCE[name].suffix == ".cpp"]
FILES = [name for name in MODELS if program_of(name) in PROGRAMS]
TRACED = FILES + [name for name in RANDOM if program_of(name) in PROGRAMS]
OWN_OPTIONS = {"runq_w8a8": ("--attn", "int8"), "runq_moe": ("--no-fuse",)}  # of a program alone
HELD_OUT = ROOT / "models" / "held_out.txt"
FULL_DISK = Path("/dev/full")
CXX = os.environ.get("CXX", "g++")


def run(path, *args, folder="build/plain", program=None, **options):
    """Runs the plain program of a model file."""
    command = [str(ROOT / folder / (program or program_of(path.stem))), str(path), *map(str, args)]
    options = {"stdin": subprocess.DEVNULL, "timeout": 300} | options
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False, **options)


def ids_of(done):
    """The ids that --print-ids has printed."""
    assert done.returncode == 0, done.stderr
    return [int(i) for i in done.stdout.decode().split(",")]


def joined(ids):
    return ",".join(map(str, ids))


def first_file(program):
    return next(name for name in FILES if program_of(name) == program)


def test_make_knows_the_whole_programs():
    plain = re.search(r"^PLAIN_PROGRAMS := (.*)$", (ROOT / "mk" / "build.mk").read_text(), re.M)
    assert plain[1].split() == PROGRAMS


# ---- one line


def first_commands(program):
    """The lines of the first comment that compile the file."""
    comment = SOURCE[program].read_text().split("\n\n")[0].splitlines()
    assert all(line.startswith("//") for line in comment)
    return [line.removeprefix("//").strip() for line in comment if line.startswith("//     g++ ")]


def compiled(command, program, folder):
    """The program that a line compiles where nothing but its source is."""
    shutil.copy(SOURCE[program], folder)
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert sorted(path.name for path in folder.iterdir()) == [program, SOURCE[program].name]
    return folder / program


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_line_in_the_file_compiles_it(tmp_path, program):
    """Of runq, with FULL=1 of each; the others' lines are read, and build/plain has what such a line makes."""
    whole = [line for line in first_commands(program) if "-DNO_TOKENIZER" not in line]
    assert whole == [
        f"g++ -std=c++20 -O3 -march=native -ffp-contract=off -fopenmp {program}.cpp -o {program} -lpcre2-8 -lutf8proc",
    ]
    binary = ROOT / "build" / "plain" / program
    if FULL or program == "runq":
        binary = compiled(whole[0], program, tmp_path)
    else:
        shutil.copy(SOURCE[program], tmp_path)
        subprocess.run(whole[0] + " -fsyntax-only", shell=True, cwd=tmp_path, check=True)
    name = first_file(program)
    golden = generations(name)[-1]
    command = [binary, BIN[name], "-i", golden["prompt"], "-t", "0", "-n", "64"]
    printed = subprocess.run([*command, "--print-ids"], capture_output=True, check=False)
    assert ids_of(printed) == golden["new_ids"]
    told, fast = (
        subprocess.run([str(path), *map(str, command[1:])], cwd=ROOT, capture_output=True, check=True).stdout
        for path in (binary, ROOT / program)
    )
    assert told == fast
    assert len(told) > 100


@pytest.mark.parametrize("program", PROGRAMS)
def test_ids_take_no_library(tmp_path, program):
    """Of runq, with FULL=1 of each; of the others, whose section of text is the same, that it compiles."""
    line = (
        f"g++ -std=c++20 -O{1 if FULL else 0} -Wall -Wextra -Werror -DNO_TOKENIZER {program}.cpp -o {program} -fopenmp"
    )
    if not FULL and program != "runq":
        shutil.copy(SOURCE[program], tmp_path)
        subprocess.run(line + " -fsyntax-only", shell=True, cwd=tmp_path, check=True)
        return
    binary = compiled(line, program, tmp_path)
    name = first_file(program)
    golden = generations(name)[-1]
    command = [binary, BIN[name], "-t", "0", "-n", "8"]
    ids = ["--ids", joined(golden["prompt_ids"])]
    printed = subprocess.run([*command, *ids, "--print-ids"], capture_output=True, check=False)
    assert ids_of(printed) == golden["new_ids"][:8]
    refused = subprocess.run([*command, "-i", "Once"], capture_output=True, check=False)
    assert_one_line(refused, program)


# ---- goldens


@pytest.mark.parametrize("name", FILES)
def test_greedy_ids_from_text_are_the_goldens(name):
    for golden in golden_json(name)["generations"]:
        for prompt in (["-i", golden["prompt"]], ["--ids", joined(golden["prompt_ids"])]):
            assert ids_of(run(BIN[name], *prompt, "-t", 0, "-n", 64, "--print-ids")) == golden["new_ids"]


@pytest.mark.parametrize("name", TRACED)
@pytest.mark.parametrize("threads", [1, 3])
def test_trace_against_the_golden_trace(tmp_path, name, threads):
    path = ROOT / "golden" / "data" / f"{name}.trace.safetensors"
    golden = read_trace(path)
    options = ["--ids", joined(golden["tokens"]), "-n", 1, "-t", 0, "-j", threads, "--print-ids"]
    assert run(BIN[name], *options, "--trace", tmp_path / "t").returncode == 0
    reports = compare(golden, read_trace(tmp_path / "t"))
    assert len(reports) > N_STEPS
    assert all(r.ok for r in reports), [r for r in reports if not r.ok]


# Of the long tests: one file of each program, with FULL=1 all.
SOME_FILES = FILES if FULL else [first_file(program) for program in PROGRAMS]


@pytest.mark.parametrize("name", SOME_FILES)
def test_perplexity_is_that_of_the_reference(name):
    golden = golden_json(name)["held_out"]
    words = run(BIN[name], "--ppl", HELD_OUT).stdout.decode().split()
    assert words[0] == "perplexity"
    assert int(words[3]) == golden["tokens"]
    assert float(words[1]) == pytest.approx(golden[name.split(".")[1]], abs=5.1e-5)


# ---- the same as over the engine


def digest_of(done):
    """What --digest printed: of all logits that a token was drawn by."""
    return re.search(r"^digest +([0-9a-f]{16})$", done.stderr.decode(), re.M)[1]


@pytest.mark.parametrize("name", FILES)
def test_drawn_ids_and_digests_are_those_of_the_engine(name):
    for options in (["-k", 0, "-p", 0.9], ["-k", 20, "-p", 1], ["-k", 50, "-p", 0.8]):
        args = [BIN[name], "-i", "Once upon a time", "-t", 0.8, *options, "-s", 11, "-n", 40, "--print-ids", "--digest"]
        plain, engine = (run(*args, folder=folder) for folder in ("build/plain", ""))
        assert ids_of(plain) == ids_of(engine)
        assert digest_of(plain) == digest_of(engine)


@pytest.mark.parametrize("name", TRACED)
def test_a_trace_is_that_of_the_engine(tmp_path, name):
    """To the bit."""
    ids = joined(read_trace(ROOT / "golden" / "data" / f"{name}.trace.safetensors")["tokens"])
    for options in {(), OWN_OPTIONS.get(program_of(name), ())}:
        for folder, trace in (("build/plain", "plain"), ("", "engine")):
            args = ["--ids", ids, "-n", 1, "-t", 0, "--print-ids", "--trace", tmp_path / trace, *options]
            done = run(BIN[name], *args, folder=folder)
            assert done.returncode == 0, done.stderr
        plain, engine = read_trace(tmp_path / "plain"), read_trace(tmp_path / "engine")
        assert plain.keys() == engine.keys()
        assert [step for step in engine if not equal(plain[step], engine[step])] == [], options


def equal(a, b):
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.mark.parametrize("name", FILES)
def test_threads_change_no_id(name):
    """Of a prompt that takes several chunks."""
    args = ["-i", HELD_OUT.read_text()[:500], "-t", 0.8, "-s", 1, "-n", 40, "--print-ids"]
    ids = ids_of(run(BIN[name], *args, "-j", 1))
    assert len(ids) > 10
    assert ids_of(run(BIN[name], *args, "-j", 3)) == ids


# ---- what the file is


def branches(source):
    """Each line with whether it is for the engine, the other form alone, or both: "engine", "plain", ""."""
    opened = []  # for each #if: which form takes this branch
    for line in source.splitlines():
        words = re.sub(r"^\s*#\s*", "#", line).split()
        if words and words[0].startswith("#if"):
            on_engine = {"#ifdef ENGINE": "engine", "#ifndef ENGINE": "plain"}
            opened.append(on_engine.get(" ".join(words[:2]), ""))
        elif words and words[0] in ("#else", "#elif"):
            opened[-1] = {"engine": "plain", "plain": "engine"}.get(opened[-1], "")
        elif words and words[0] == "#endif":
            opened.pop()
        yield line, next((form for form in opened if form), "")


@pytest.mark.parametrize("program", WHOLE)
def test_the_file_is_short(program):
    assert len(SOURCE[program].read_text().splitlines()) <= LIMITS[program][0]


@pytest.mark.parametrize("program", WHOLE)
def test_most_of_what_a_reader_looks_for_comes_first(program):
    """What is behind the forward pass are files, text and the command line."""
    lines = SOURCE[program].read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if re.match(r"\S.* forward\(.*\{$", line))
    end = lines.index("}", begin) + 1
    assert end <= LIMITS[program][1] * len(lines)


@pytest.mark.parametrize("program", WHOLE)
def test_the_file_needs_no_other(program):
    source = SOURCE[program].read_text()
    # But for the emulator, which stands in for a GPU.
    assert {form for line, form in branches(source) if re.match('#include "(?!simt/)', line)} == {"engine"}
    if SOURCE[program].suffix == ".cpp":
        assert not re.search(r"immintrin|\b(__)?asm(__)?\b|\b_mm\d*_|\b__m\d+", source)


# ---- mistakes


def assert_one_line(done, program, *codes):
    """A run that failed with one line that begins with the program's name, and printed nothing else."""
    assert done.returncode in (codes or (1, 2)), done
    assert done.stdout in (b"", ""), done
    error = done.stderr if isinstance(done.stderr, str) else done.stderr.decode()
    assert re.fullmatch(rf"{program}: \S.*\n", error), error


USAGE = {
    "unknown option": ["--promt", "Once"],
    "unknown letter": ["-q", "1"],
    "no value": ["-i"],
    "no number": ["-n", "many"],
    "a number and more": ["-n", "3x"],
    "too small": ["-j", "0"],
    "negative": ["-t", "-1"],
    "too large": ["-p", "1.5"],
    "no finite number": ["-t", "nan"],
    "outside of an int": ["-n", "99999999999999999999"],
    "a prompt without its option": ["Once upon a time"],
    "an unknown mode": ["-m", "talk"],
    "ids that are none": ["--ids", "1,x"],
    "no ids": ["--ids", ""],
    "ids outside the vocabulary": ["--ids", "1,99999999"],
    "negative ids": ["--ids", "-1"],
    "a prompt and ids": ["-i", "Once", "--ids", "1"],
    "a prompt that is too long": ["-i", "Once upon a time", "-c", "2"],
    "a context that is too long": ["-i", "Once", "-c", "99999999"],
    "no UTF-8": ["-i", b"Once \xff\xfe upon"],
}
FILES_OF_OTHERS = {
    "no file": None,
    "empty": b"",
    "a byte": b"r",
    "GGUF": b"GGUF\3\0\0\0" + bytes(400),
    "zeros": bytes(4096),
    "text": b"Once upon a time\n" * 100,
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("mistake", USAGE)
def test_wrong_options(program, mistake):
    command = [ROOT / "build" / "plain" / program, BIN[first_file(program)], *USAGE[mistake]]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60)
    assert_one_line(done, program, 2)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("what", FILES_OF_OTHERS)
def test_what_is_no_model_file(tmp_path, program, what):
    path = tmp_path / "model.bin"
    if FILES_OF_OTHERS[what] is not None:
        path.write_bytes(FILES_OF_OTHERS[what])
    done = run(path, "-i", "Once", program=program)
    assert_one_line(done, program, 1)
    assert str(path) in done.stderr.decode()


@pytest.mark.parametrize("program", PROGRAMS)
def test_other_mistakes(tmp_path, program):
    path = BIN[first_file(program)]
    binary = ROOT / "build" / "plain" / program
    assert_one_line(subprocess.run([binary], capture_output=True, check=False), program, 2)  # no model
    assert_one_line(run(tmp_path, "-i", "Once", program=program), program, 1)  # a directory
    other = next(BIN[name] for name in MODELS if program_of(name) != program)
    assert_one_line(run(other, "-i", "Once", program=program), program, 1)
    (tmp_path / "prompt.txt").write_bytes(b"Once \xff upon")
    for options in (
        ["-f", tmp_path / "prompt.txt"], ["-f", tmp_path / "none.txt"], ["-f", tmp_path],
        ["--ppl", tmp_path / "prompt.txt"], ["--ppl", tmp_path / "none.txt"],
    ):  # fmt: skip
        assert_one_line(run(path, *options), program, 1, 2)
    done = run(path, "-i", "Once", "-n", "1", "--trace", tmp_path / "none" / "t")
    assert done.returncode == 1
    assert re.fullmatch(rf"{program}: .*{tmp_path}.*\n", done.stderr.decode())
    if FULL_DISK.exists():
        with FULL_DISK.open("wb") as full:
            command = [binary, path, "-i", "Once", "-n", "5"]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == f"{program}: cannot write the output".encode()


# ---- damaged files


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_end_with_one_line_and_never_crash(tmp_path, name):
    """Of the copies that tests/test_broken_files.py gives to the engine; with FULL=1 eight times as many."""
    program = program_of(name)
    n = (800 if FULL else 100) // max(2, sum(program_of(other) == program for other in FILES))
    env = os.environ | {"ASAN_OPTIONS": "exitcode=99:allocator_may_return_null=1:max_allocation_size_mb=4000",
                        "UBSAN_OPTIONS": "halt_on_error=1:exitcode=99"}  # fmt: skip

    def outcome(i_case):
        i, case = i_case
        path = tmp_path / f"{i}.bin"
        path.write_bytes(case.data)
        done = run(path, *RUN, folder="build/plain-asan", program=program, env=env)
        path.unlink()
        error = re.sub(r"(?m)^(prefill|decode) .* tokens/s\n", "", done.stderr.decode(errors="replace"))
        if done.returncode == 1 and re.fullmatch(f"{program}: .+\n", error):
            return "refused"
        if done.returncode == 2 and re.fullmatch(f"{program}: .* tokens long, the context only .*\n", error):
            return "ran"  # a whole file, only with a context too short for the prompt
        if done.returncode == 0 and not error:
            return "ran"  # there is no checksum that this looks at
        return f"{case.what}: exit {done.returncode}: {done.stdout[:80]} {error[-1500:]}"

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = list(pool.map(outcome, enumerate(broken_copies(BIN[name], n))))
    assert [line for line in found if line not in ("refused", "ran")] == []
    assert found.count("refused") >= len(found) // 2
    assert found.count("ran") >= len(found) // 20


def test_heads_of_a_file_without_extension_have_a_limit(tmp_path):
    """Rows of keys and what loops add up (docs/hardware.md) are bounded by it; in the other files a field says it."""
    data = bytearray(BIN["tiny-llama.q8"].read_bytes())
    data[0x40:0x100] = bytes(0xC0)
    for offset, value in ((0x08, 1 << 13), (0x14, 1), (0x18, 1)):  # dim, n_heads, n_kv_heads
        data[offset : offset + 4] = value.to_bytes(4, "little")
    (tmp_path / "model.bin").write_bytes(data)
    for folder in ("build/plain", "."):
        done = run(tmp_path / "model.bin", *RUN, folder=folder, program="runq")
        assert (done.returncode, done.stdout) == (1, b"")
        assert b"head_dim is 8192, expected 2 to 4096\n" in done.stderr


# ---- coverage

FORWARD = ("quantize_group", "quantize", "dot", "matmul", "embed", "rmsnorm", "rope", "softmax", "attention", "swiglu",
           "add", "hadamard", "rotate", "rotate_back", "attention_block", "feed_forward_block", "forward")  # fmt: skip


def counts_by_function(binary, folder):
    """What gcov says of a program's own file: executions of each line, and the lines of each function."""
    command = ["gcov", "--json-format", "--stdout", *map(str, folder.glob("*.gcda"))]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    (found,) = [file for file in json.loads(done.stdout)["files"] if file["file"].endswith(f"{binary}.cpp")]
    counts = {}
    for line in found["lines"]:
        number = line["line_number"]
        counts[number] = max(counts.get(number, 0), line["count"])
    functions = {}
    for function in found["functions"]:
        name = re.sub(r"<.*", "", function["demangled_name"].split("(")[0]).split()[-1].split("::")[-1]
        functions.setdefault(name, []).append(range(function["start_line"], function["end_line"] + 1))
    return counts, functions


def unreached(counts, lines, source):
    """Of some lines, those that were never executed."""
    return [f"{i}: {source[i - 1]}" for i in lines if counts.get(i) == 0]


@pytest.mark.skipif(not shutil.which("gcov"), reason="needs gcov")
@pytest.mark.parametrize("program", PROGRAMS)
def test_stories_run_every_line_of_the_forward_pass(tmp_path, program):
    flags = ["-std=c++20", "-O1", "-fopenmp", "--coverage"]
    command = ["g++", *flags, SOURCE[program], "-o", program, "-lpcre2-8", "-lutf8proc"]
    subprocess.run(command, cwd=tmp_path, check=True)
    source = SOURCE[program].read_text().splitlines()

    def covered(name, *args, **options):
        done = run(BIN[name], *args, "-j", 1, folder=tmp_path, program=program, **options)  # counters are no atomics
        assert done.returncode == 0, done.stderr
        return done

    models = [name for name in FILES if program_of(name) == program]
    for name in models:
        for options in {(), OWN_OPTIONS.get(program, ())}:
            covered(name, "-i", "Once upon a time", "-n", 3, "-s", 1, *options)
    (tmp_path / "rotated").mkdir()
    scheme = next(scheme for scheme, file_format in FORMATS.items() if file_format.program == program)
    rotated = export_rotated(scheme, tmp_path / "rotated")
    assert run(rotated, "--ids", "1,2,3", "-n", 2, "-j", 1, folder=tmp_path, program=program).returncode == 0
    counts, functions = counts_by_function(program, tmp_path)
    assert set(FORWARD) - functions.keys() == set()
    lines = sorted({i for name in FORWARD for part in functions[name] for i in part})
    assert unreached(counts, lines, source) == []

    text = tmp_path / "text"
    text.write_text(HELD_OUT.read_text()[:200])
    name = models[0]
    covered(name, "-f", text, "-n", 4, "-t", 0.9, "-k", 10, "-p", 0.8, "-c", 500, "--print-ids")
    covered(name, "--ids", "1,2,3", "-n", 4, "-t", 0, "--trace", tmp_path / "t")
    covered(models[-1], "--ids", "1,2,3", "-n", 1, "--print-ids", "--trace", tmp_path / "t")
    covered(name, "--ppl", text)
    chat = {"stdin": None, "input": b"Tell me a story.\nAnd another.\n"}
    for name in models:
        covered(name, "-m", "chat", "-n", 20 if name == models[0] else 2, "-s", 1, **chat)
    counts, _ = counts_by_function(program, tmp_path)
    usual = [i for i in counts if not re.search(r"\bthrow\b|\bfail\(", source[i - 1])]
    reached = [i for i in usual if counts[i]]
    share = len(reached) / len(usual)
    assert share >= 0.9, f"{share:.3f}\n" + "\n".join(unreached(counts, usual, source))


# ---- loops that can be taken out


def lifted(program):
    """The functions that are marked as ones to take along, by name: from the marker to the closing brace."""
    lines = SOURCE[program].read_text().splitlines()
    found = {}
    for i, line in enumerate(lines):
        if marker := re.fullmatch(r"// lift (\w+)", line):
            found[marker[1]] = "\n".join(lines[i : lines.index("}", i) + 1]) + "\n"
    return found


LIFTED_INCLUDES = "".join(f"#include <{name}>\n" for name in ("algorithm", "cmath", "cstdint", "limits"))
# Pragmas of OpenMP may be ignored.
LIFT_FLAGS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-Wno-unknown-pragmas",
              "-fno-exceptions"]  # fmt: skip


@pytest.mark.parametrize("program", WHOLE)
def test_marked_loops_compile_alone(tmp_path, program):
    functions = lifted(program)
    assert functions
    for name, text in functions.items():
        assert re.search(rf"^(?!//)\S.*\b{name}\(", text, re.M), name
        assert "std::vector" not in text and "new " not in text, name
    (tmp_path / "lifted.cpp").write_text(LIFTED_INCLUDES + "\n".join(functions.values()))
    words_of_cuda = ["-D__device__="] if SOURCE[program].suffix == ".cu" else []
    subprocess.run([CXX, *LIFT_FLAGS, *words_of_cuda, "-c", "lifted.cpp", "-o", "lifted.o"], cwd=tmp_path, check=True)


# Of a quantizer: prints codes, and the bits of scales.
LIFT_DRIVER = """
#include <cstdio>
#include <cstring>

static const uint32_t bits[] = {%(bits)s};
enum { n = sizeof bits / sizeof bits[0], group_size = %(group_size)d };
static float x[n];
static int8_t codes[n];

int main() {
    std::memcpy(x, bits, sizeof x);
    for (int i = 0; i < n; i += group_size) {
        const float scale = quantize_group(&codes[i], &x[i], group_size);
        uint32_t scale_bits;
        std::memcpy(&scale_bits, &scale, sizeof scale);
        std::printf("%%u", scale_bits);
        for (int k = i; k < i + group_size; k++) std::printf(" %%d", codes[k]);
        std::printf("\\n");
    }
}
"""


@pytest.mark.parametrize("vectors", ["64", "limits"])
@pytest.mark.parametrize("program", [name for name in PROGRAMS if "quantize_group" in lifted(name)])
def test_a_marked_loop_gives_the_golden_vectors(tmp_path, program, vectors):
    """On arrays of fixed size, without a heap."""
    ops = load_file(ROOT / "golden" / "data" / "ops.safetensors")
    x, codes, scales = (ops[f"quantize.{vectors}.{what}"] for what in ("x", "codes", "scales"))
    group_size = x.size // scales.size
    driver = LIFT_DRIVER % {"bits": joined(x.reshape(-1).view(np.uint32)), "group_size": group_size}
    (tmp_path / "lifted.cpp").write_text(LIFTED_INCLUDES + "\n".join(lifted(program).values()) + driver)
    subprocess.run([CXX, *LIFT_FLAGS, "lifted.cpp", "-o", "lifted"], cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "lifted"], capture_output=True, text=True, check=True).stdout
    found = np.array([line.split() for line in printed.splitlines()], np.int64)
    assert np.array_equal(found[:, 0], scales.reshape(-1).view(np.uint32))
    assert np.array_equal(found[:, 1:], codes.reshape(-1, group_size))
