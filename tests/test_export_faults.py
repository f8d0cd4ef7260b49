"""What the exporter makes of bad directories, bad outputs and bad moments.

The promise: exit code 0 means that the program opens the file and generates. Anything else is one line, without a
traceback, and nothing is left behind.
"""

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import export.__main__
from export import chat_template
from export.chat_template import chat_pieces
from formats.checkpoint import CLASSIFIER, EMBEDDING, Checkpoint, ModelError, read_config
from formats.files import new_directory, replacing
from formats.schemes import FORMATS
from tests.helpers import CALIBRATION, FULL, MODELS, ROOT, default_signals, launch_export, run_export
from tests.malformed import LFS_POINTER, Case, field_cases, file_cases, small_model, weight_cases

Q8, W8A8, AWQ = ("q8", "--group-size", "32"), ("w8a8", "--no-smooth"), ("awq", "--rtn", "--group-size", "64")
EXPORTER_LINE = re.compile(r"export: [^\x00-\x1f\x7f-\x9f]+")
opened: set[int] = set()  # checksums of files that a program has opened


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A small model; a test that changes it puts it back."""
    return small_model(MODELS / "tiny-llama", tmp_path_factory.mktemp("small") / "model")


@pytest.fixture
def model(small, tmp_path):
    """A small model of a test's own."""
    return shutil.copytree(small, tmp_path / "model")


@pytest.fixture
def no_sync(monkeypatch):
    """Thousands of exports need not outlast a loss of power."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def exported(scheme, hf_dir, out, *options):
    """Exit code and lines on the standard error of an export in this process."""
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        code = export.__main__.main([scheme[0], str(hf_dir), str(out), "--quiet", *scheme[1:], *map(str, options)])
    return code, stderr.getvalue().splitlines()


def generates(scheme, out):
    """What a program says that cannot run a file; none if it can, or has run one with the same content.

    Weights may be so large that what they are multiplied to is infinite: then it says which step is, and that is right.
    """
    checksum = zlib.crc32(out.read_bytes())
    if checksum in opened:
        return ""
    command = [ROOT / FORMATS[scheme[0]].program, out, "-n", "2", "-t", "0"]
    done = subprocess.run([*command, "-i", "Once"], capture_output=True, text=True, timeout=300, check=False)
    if "the context only 1" in done.stderr:
        done = subprocess.run([*command, "--ids", "1"], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode == 0:
        opened.add(checksum)
    is_promised = re.fullmatch(r".*: position \d+: \S+ is the first step that is not finite: .*\n", done.stderr)
    return done.stderr if done.returncode and not is_promised else ""


def broken_promise(scheme, hf_dir, out, *options):
    """Exports, and says what is wrong with what came of it; None if nothing is."""
    beside = sorted(out.parent.iterdir())
    try:
        code, lines = exported(scheme, hf_dir, out, *options)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    if code == 0:
        found = generates(scheme, out) or [line for line in lines[:-1] if not line.startswith("export: warning: ")]
        out.unlink()
    else:
        found = None if code == 1 and len(lines) == 1 and EXPORTER_LINE.fullmatch(lines[0]) else (code, lines)
    left = set(out.parent.iterdir()) - set(beside)
    return found or (f"left {left}" if left else None)


@contextlib.contextmanager
def broken(hf_dir, case: Case):
    """The directory with a case in it."""
    path = hf_dir / case.file
    content = path.read_bytes()
    try:
        case.content(path) if callable(case.content) else path.write_bytes(case.content)
        yield
    finally:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        path.write_bytes(content)


def check_cases(scheme, hf_dir, out, cases):
    """The promise holds for each."""
    wrong = {}
    for case in cases:
        with broken(hf_dir, case):
            found = broken_promise(scheme, hf_dir, out)
        if found:
            wrong[case.name] = found
    assert not wrong
    assert broken_promise(scheme, hf_dir, out) is None


FILES = ["config.json", "generation_config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json",
         "tokenizer.json", "tokenizer_config.json"]  # fmt: skip


@pytest.mark.parametrize("file", [file for file in FILES if file.endswith(".json")])
def test_wrong_fields(small, tmp_path, no_sync, file):
    """One in three, with FULL=1 all."""
    cases = [case for case in field_cases(small) if case.file == file]
    assert len(cases) > 30
    check_cases(Q8, small, tmp_path / "out.bin", cases if FULL else cases[::3])


@pytest.mark.parametrize("file", FILES)
def test_broken_files(small, tmp_path, no_sync, file):
    cases = [case for case in file_cases(small) if case.file == file]
    assert len(cases) > 10
    check_cases(Q8, small, tmp_path / "out.bin", cases)


def test_broken_weights(small, tmp_path, no_sync):
    check_cases(Q8, small, tmp_path / "out.bin", list(weight_cases(small)))


@pytest.mark.parametrize("scheme", [W8A8, AWQ], ids=lambda s: s[0])
def test_other_schemes_keep_the_promise(small, tmp_path, no_sync, scheme):
    cases = [*file_cases(small), *weight_cases(small), *field_cases(small)]
    check_cases(scheme, small, tmp_path / "out.bin", cases[::30])


def test_a_broken_tokenizer_in_calibration(small, tmp_path, no_sync):
    """`tokenizers` itself reads it there, and panics at some."""
    cases = [c for c in [*file_cases(small), *field_cases(small)] if c.file == "tokenizer.json"]
    (tmp_path / "text").write_text("Once upon a time " * 5)
    scheme = ("w8a8", "--no-tokenizer", "--calib", str(tmp_path / "text"), "--samples", "1", "--seq-len", "8")
    wrong = {}
    for case in cases[::7]:
        with broken(small, case):
            code, lines = exported(scheme, small, tmp_path / "out.bin")
        if code not in (0, 1) or (code == 1 and not (len(lines) == 1 and EXPORTER_LINE.fullmatch(lines[0]))):
            wrong[case.name] = code, lines
    assert not wrong


# ---- what was silently wrong


def with_fields(hf_dir, file="config.json", **fields):
    """The directory with some fields of a JSON file replaced."""
    path = hf_dir / file
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return hf_dir


def test_a_classifier_beside_a_tied_embedding(model, tmp_path):
    """transformers ties the two only if they are equal; tests/hf/llama-contradictory has its logits."""
    shard = model / "model-00001-of-00002.safetensors"
    index = model / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    embedding = load_file(model / weight_map[EMBEDDING])[EMBEDDING]
    with_fields(model, index.name, weight_map=weight_map | {CLASSIFIER: shard.name})
    stored = load_file(shard)

    def config_with(classifier):
        save_file(stored | {CLASSIFIER: classifier}, shard)
        return Checkpoint(model).config

    assert config_with(embedding).tied
    different = embedding.copy()
    different[-1, -1] += 1
    assert not config_with(different).tied
    assert np.array_equal(Checkpoint(model).tensor(CLASSIFIER), different.astype(np.float32))
    assert broken_promise(Q8, model, tmp_path / "out.bin") is None
    assert not config_with(embedding.astype(np.float32)).tied
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape"):
        config_with(embedding[:-1])


def test_comparing_two_large_matrices_takes_little_memory(model, monkeypatch):
    rows = 300_000
    n_bytes = rows * 64 * 2
    big = np.ones((rows, 64), np.float16)
    with_fields(model, vocab_size=rows)
    (model / "model.safetensors.index.json").unlink()
    weights = {name: value for file in model.glob("*.safetensors") for name, value in load_file(file).items()}
    save_file(weights | {EMBEDDING: big, CLASSIFIER: big}, model / "model.safetensors")
    monkeypatch.setattr("formats.checkpoint.COMPARED_VALUES", n_bytes // 64)
    tracemalloc.start()
    assert Checkpoint(model).config.tied
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < n_bytes / 2


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 128}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 300.0}


@pytest.mark.parametrize(
    ("fields", "theta", "factor"),
    [
        ({"rope_scaling": LLAMA3, "rope_parameters": PLAIN}, 500000.0, 8.0),
        ({"rope_scaling": PLAIN, "rope_parameters": LLAMA3}, 300.0, None),
        ({"rope_scaling": None, "rope_parameters": PLAIN}, 300.0, None),
        ({"rope_scaling": {}, "rope_parameters": LLAMA3}, 500000.0, 8.0),
        ({"rope_scaling": {"rope_type": "default"}, "rope_parameters": PLAIN}, 500000.0, None),
    ],
)
def test_rope_scaling_replaces_rope_parameters(model, fields, theta, factor):
    """All of it, also a theta in it; what is then missing comes from config.json. An empty one replaces nothing."""
    config = read_config(with_fields(model, **fields))
    assert (config.rope_theta, config.rope_scaling and config.rope_scaling.factor) == (theta, factor)


@pytest.mark.parametrize(
    ("file", "fields", "text"),
    [
        ("config.json", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "rope_parameters": PLAIN},
         'rope_scaling.rope_type is "dynamic": supported are default, llama3, linear and yarn (dynamic\'s frequencies'),
        ("config.json", {"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
         'rope_parameters.full_attention is {"rope_type": "yarn"}: not supported'),
        ("config.json", {"tie_word_embeddings": "false"}, 'tie_word_embeddings is "false": expected true or false'),
        ("config.json", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: not supported"),
        ("config.json", {"rope_scaling": LLAMA3 | {"partial_rotary_factor": 0.25}},
         "rope_scaling.partial_rotary_factor is 0.25: not supported"),
        ("config.json", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: expected 1 to 4096"),
        ("config.json", {"vocab_size": 2**24 + 1}, "vocab_size is 16777217: expected 1 to 16777216"),
        ("config.json", {"vocab_size": 2**24}, "config.json implies (16777216, 64)"),
        ("config.json", {"max_position_embeddings": 2**25},
         "max_position_embeddings is 33554432: expected 1 to 16777216"),
        ("config.json", {"rms_norm_eps": 2}, "rms_norm_eps is 2: expected 0 to 1"),
        ("config.json", {"rope_theta": 0.5}, "rope_theta is 0.5: expected 1 to 1e+12"),
        ("config.json", {"rope_theta": 1e13}, "rope_theta is 10000000000000.0: expected 1 to 1e+12"),
        ("config.json", {"rope_scaling": LLAMA3 | {"factor": 0.5}}, "rope_scaling.factor is 0.5: expected 1 to 1e+06"),
        ("config.json", {"rope_scaling": LLAMA3 | {"high_freq_factor": 1 + 1e-9}},
         "rope_scaling.high_freq_factor is 1.000000001: must be above low_freq_factor"),
        ("generation_config.json", {"top_k": 20.5}, "generation_config.json: top_k is 20.5, expected a whole number"),
        ("generation_config.json", {"do_sample": "false"}, 'do_sample is "false", expected true or false'),
        ("generation_config.json", {"eos_token_id": True}, "eos_token_id is true, expected an id below vocab_size"),
    ],
)  # fmt: skip
def test_fields_that_no_program_runs(model, tmp_path, file, fields, text):
    code, lines = exported(Q8, with_fields(model, file, **fields), tmp_path / "out.bin")
    assert (code, len(lines)) == (1, 1)
    assert text in lines[0]
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_position_embeddings": 2**24},
        {"rms_norm_eps": 0}, {"rms_norm_eps": 1}, {"rope_theta": 1}, {"rope_theta": 1e12},
        {"rope_scaling": LLAMA3 | {"factor": 1, "low_freq_factor": 1e-6}},
        {"rope_scaling": LLAMA3 | {"factor": 1e6, "high_freq_factor": 1e6}},
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 2**24}},
    ],
)  # fmt: skip
def test_the_ends_of_the_ranges_run(model, tmp_path, no_sync, fields):
    out = tmp_path / "out.bin"
    code, lines = exported(Q8, with_fields(model, **fields), out)
    assert code == 0, lines
    assert generates(Q8, out) == ""


def with_tokenizer(hf_dir, change):
    """The directory with a change to its tokenizer.json."""
    path = hf_dir / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    change(tokenizer)
    path.write_text(json.dumps(tokenizer))
    return hf_dir


def set_special(tokenizer):
    tokenizer["added_tokens"][0]["special"] = 100


def set_bos(tokenizer):
    tokenizer["post_processor"]["processors"][1]["special_tokens"]["<|begin_of_text|>"]["ids"] = [5000]


def set_pattern(tokenizer):
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "[z-a]+"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_special, "added_tokens[0].special: 100 is not true or false"),
        (set_bos, "post_processor.special_tokens.ids: 5000 is not below the model's vocab_size"),
        (set_pattern, 'pre_tokenizer.pattern: "[z-a]+" cannot be translated: z-a in [z-a] is no range'),
    ],
)
def test_tokenizers_that_no_program_reads(model, tmp_path, change, text):
    code, lines = exported(Q8, with_tokenizer(model, change), tmp_path / "out.bin")
    assert (code, len(lines)) == (1, 1)
    assert text in lines[0]


# ---- files that are not what they seem


@pytest.mark.parametrize("name", ["/etc/passwd", "../model/model.safetensors", "a/../../b", "", ".", "a\0b"])
def test_an_index_that_leads_out_of_its_directory(model, tmp_path, name):
    weight_map = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    with_fields(model, "model.safetensors.index.json", weight_map=weight_map | {EMBEDDING: name})
    code, lines = exported(Q8, model, tmp_path / "out.bin")
    assert code == 1
    assert lines[0].endswith(f"weight_map.{EMBEDDING} is {json.dumps(name)}, expected a file of this directory")


def test_links_of_a_cache_are_followed(model, tmp_path):
    """The Hugging Face cache has links to files elsewhere, with names that say nothing."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for i, file in enumerate(sorted(model.iterdir())):
        file.rename(blobs / str(i))
        file.symlink_to(Path("..") / "blobs" / str(i))
    assert broken_promise(Q8, model, tmp_path / "out.bin") is None


@pytest.mark.parametrize("file", ["model-00001-of-00002.safetensors", "tokenizer.json"])
def test_a_git_lfs_pointer_is_called_one(model, tmp_path, file):
    (model / file).write_bytes(LFS_POINTER)
    code, lines = exported(Q8, model, tmp_path / "out.bin")
    what = "is a Git LFS pointer, not the file itself; run `git lfs pull` in the directory it was cloned to"
    assert (code, lines) == (1, [f"export: {model / file}: {what}"])


# ---- outputs


def as_fifo(path):
    os.mkfifo(path)


def as_device_link(path):
    path.symlink_to("/dev/null")


def as_device(path):
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))  # a character device: another /dev/null
    except PermissionError:
        pytest.skip("needs root, who makes devices")


@pytest.mark.parametrize(
    ("make", "kind"), [(as_fifo, "FIFO"), (as_device_link, "character device"), (as_device, "character device")]
)
def test_an_output_that_is_no_regular_file(model, tmp_path, make, kind):
    out = tmp_path / "out.bin"
    make(out)
    before = out.lstat()
    code, lines = exported(Q8, model, out)
    assert (code, lines) == (1, [f"export: {out}: is a {kind}, expected a regular file"])
    assert os.path.samestat(out.lstat(), before)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out.bin"]


@pytest.mark.parametrize("scheme", [Q8, W8A8, AWQ], ids=lambda s: s[0])
def test_an_output_that_is_an_input(model, tmp_path, scheme):
    shard = model / "model-00001-of-00002.safetensors"
    content = shard.read_bytes()
    os.link(shard, tmp_path / "hard")
    (tmp_path / "soft").symlink_to(shard)
    for out in (shard, model / ".." / "model" / shard.name, tmp_path / "hard", tmp_path / "soft"):
        code, lines = exported(scheme, model, out)
        assert (code, lines) == (1, [f"export: {out}: is the same file as the input {shard}"])
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        code, lines = exported(scheme, model, model / name)
        assert (code, lines) == (1, [f"export: {model / name}: is the same file as the input {model / name}"])
    assert shard.read_bytes() == content
    assert exported(scheme, model, model / "out.bin")[0] == 0  # beside the inputs, and once more over itself
    assert exported(scheme, model, model / "out.bin")[0] == 0


def test_an_output_that_is_the_calibration_text(model, tmp_path):
    text = shutil.copy(CALIBRATION, tmp_path / "text")
    code, lines = exported(("w8a8", "--calib", str(text), "--samples", "1", "--seq-len", "8"), model, text)
    assert (code, lines) == (1, [f"export: {text}: is the same file as the input {text}"])


# ---- interrupted, killed, full

WRITER = """
import sys
from pathlib import Path
from formats.files import new_directory, replacing
path = Path(sys.argv[2])
if sys.argv[1] == "file":
    with replacing(path) as f:
        f.write(b"part")
        f.flush()
        print("ready", flush=True)
        sys.stdin.read()
else:
    with new_directory(path) as d:
        (d / "part").write_bytes(b"part")
        print("ready", flush=True)
        sys.stdin.read()
"""


def writer(kind, out):
    """A process that writes `out` and has not finished."""
    command = [sys.executable, "-c", WRITER, kind, out]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    return process


def parts(folder):
    return sorted(p for p in folder.iterdir() if p.name.endswith(".part"))


def test_what_a_killed_export_leaves_goes_with_the_next(model, tmp_path):
    out = tmp_path / "out.bin"
    live, killed, other = writer("file", out), writer("file", out), writer("file", tmp_path / "out.bin.2")
    before = set(parts(tmp_path))
    for process in (killed, other):
        process.kill()
        process.communicate()
    assert len(before) == 3
    assert exported(Q8, model, out)[0] == 0
    left = parts(tmp_path)
    assert len(left) == 2  # of the living writer, and of another name
    live.communicate(b"")
    assert live.returncode == 0
    assert out.read_bytes() == b"part"
    assert exported(Q8, model, out)[0] == 0
    assert [p.name.startswith(".out.bin.2.") for p in parts(tmp_path)] == [True]


def test_what_a_killed_writer_of_a_directory_leaves_goes_with_the_next(tmp_path):
    killed = writer("directory", tmp_path / "hf")
    killed.kill()
    killed.communicate()
    assert len(parts(tmp_path)) == 1
    with new_directory(tmp_path / "hf") as folder:
        (folder / "a").write_bytes(b"a")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    assert [p.name for p in (tmp_path / "hf").iterdir()] == ["a"]


KILLED = """
import importlib, os, signal, sys
import export.__main__
module, name = sys.argv[1].rsplit(".", 1)
setattr(importlib.import_module(module), name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
export.__main__.main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("where", "beside"), [("export.awq.finish", ".out.bin."), ("export.hf_directory.write_array", ".hf.")]
)
def test_an_export_that_is_killed_while_it_writes(model, tmp_path, where, beside):
    """Of the command itself, by SIGKILL: in the model file, and in the directory beside it."""
    out, hf = tmp_path / "out.bin", tmp_path / "hf"
    arguments = ("awq", "--rtn", "--group-size", "64", model, out, "--hf-out", hf, "--quiet")
    done = subprocess.run([sys.executable, "-c", KILLED, where, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done
    assert [p.name.startswith(beside) for p in parts(tmp_path)] == [True]
    assert (out.exists(), hf.exists()) == (beside == ".hf.", False)
    done = run_export(*arguments)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "model", "out.bin"]


def test_a_part_that_is_taken_for_stale_is_made_again(tmp_path, monkeypatch):
    """Between making a temporary file and locking it, another process may find it without a lock."""
    flock, removed = fcntl.flock, []

    def slow(descriptor, how):
        if not removed:
            removed.extend(parts(tmp_path))
            removed[0].unlink()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    with replacing(tmp_path / "out.bin") as f:
        f.write(b"x")
    assert removed
    assert [p.name for p in tmp_path.iterdir()] == ["out.bin"]


INTERRUPTED = """
import os, signal, sys
import export.int8, export.__main__
def write_matrix(*_):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
export.int8.write_matrix = write_matrix
sys.exit(export.__main__.main(["q8", *sys.argv[2:], "--quiet"]))
"""


@pytest.mark.parametrize(
    ("name", "code", "how"),
    [("SIGTERM", 143, "terminated"), ("SIGHUP", 143, "terminated"), ("SIGINT", 130, "interrupted")],
)
def test_a_signal_leaves_nothing(model, tmp_path, name, code, how):
    out = tmp_path / "out.bin"
    out.write_bytes(b"old")
    command = [sys.executable, "-c", INTERRUPTED, name, model, out]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False,
        preexec_fn=default_signals,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"export: {how}, {out} was not written\n")
    assert out.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out.bin"]


def test_handlers_of_signals_are_put_back(model, tmp_path):
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP)]
    assert exported(Q8, model, tmp_path / "out.bin")[0] == 0
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP)] == before


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(Path(f"/proc/self/fd/{fd}").readlink()))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (calls.append("rename"), replace(*paths)))
    with replacing(tmp_path / "out.bin") as f:
        f.write(b"x")
    assert [c if isinstance(c, str) else c.suffix or c for c in calls] == [".part", "rename", tmp_path]


@pytest.mark.parametrize("scheme", [Q8, W8A8, AWQ], ids=lambda s: s[0])
def test_a_disk_that_is_full_when_the_file_is_complete(model, tmp_path, monkeypatch, scheme):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "out.bin"
    out.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    code, lines = exported(scheme, model, out)
    assert (code, lines) == (1, [f"export: {out}: cannot write: No space left on device"])
    assert out.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "out.bin"]


def test_out_of_memory_is_one_line(model, tmp_path, monkeypatch):
    def failing(*_):
        raise MemoryError

    monkeypatch.setattr("export.int8.write_matrix", failing)
    assert exported(Q8, model, tmp_path / "out.bin") == (1, ["export: out of memory"])
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("size", ["0", "-32", "6", "100000000000000000000", "65540"])
@pytest.mark.parametrize("scheme", ["q8", "awq"])
def test_group_sizes(model, tmp_path, scheme, size):
    options = ("--rtn",) if scheme == "awq" else ()
    code, lines = exported((scheme, *options, "--group-size", size), model, tmp_path / "out.bin")
    assert (code, len(lines)) == (1, 1)
    assert lines[0].startswith(f"export: --group-size is {size}, expected ")


# ---- chat templates

PLAIN_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def test_templates_are_rendered_elsewhere(monkeypatch):
    """Nothing of a template runs in the exporter's own process."""
    monkeypatch.setattr(chat_template, "compile_template", None)
    pieces, reason = chat_pieces(PLAIN_TEMPLATE + "{# here #}", {})
    assert b"<user>" in pieces
    assert reason == ""


@pytest.mark.parametrize(
    ("source", "limits", "text"),
    [
        (ENDLESS, {"cpu_seconds": 1}, "it takes more than 1 s of processor time"),
        ("{{ 'x' * 3000000000 }}", {"memory": 1 << 28}, "it takes more than 256 MB"),
        ("{% set a = namespace(x='x') %}{% for i in range(99) %}{% set a.x = a.x + a.x %}{% endfor %}",
         {"memory": 1 << 28}, "it takes more than 256 MB"),
        ("{{ 'x' * 1100000 }}" + PLAIN_TEMPLATE, {}, "bytes, expected at most 1048576"),
        ("{{" + "(" * 5000 + "1" + ")" * 5000 + "}}", {}, "RecursionError"),
        ("{% if 1 %}" * 150 + "{% endif %}" * 150, {}, "too many levels of indentation"),
        ("\ud800" + PLAIN_TEMPLATE, {}, "surrogates not allowed"),
        ("{{ raise_exception('a\n\x1b[2J') }}", {}, "it refuses a plain conversation"),
        ("{% if a\x1b %}", {}, "unexpected char '\\x1b'"),
    ],
)  # fmt: skip
def test_templates_that_take_too_much(source, limits, text, monkeypatch):
    monkeypatch.setattr(chat_template, "LIMITS", chat_template.LIMITS | limits)
    pieces, reason = chat_pieces(source, {})
    assert (pieces, text in reason) == (b"", True), reason
    assert EXPORTER_LINE.fullmatch(f"export: {reason}")


def test_a_template_that_hangs_is_left_out(model, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "LIMITS", chat_template.LIMITS | {"wall_seconds": 0.001})
    with_fields(model, "tokenizer_config.json", chat_template=PLAIN_TEMPLATE + "{# waits #}")
    code, lines = exported(Q8, model, tmp_path / "out.bin")
    assert (code, len(lines)) == (0, 2)
    assert lines[0] == f"export: warning: {model}: no chat template exported: it takes more than 0.001 s"
    assert generates(Q8, tmp_path / "out.bin") == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_export_takes_the_renderer_along(model, tmp_path, number, code):
    with_fields(model, "tokenizer_config.json", chat_template=ENDLESS)
    command = [sys.executable, "-m", "export", "q8", model, tmp_path / "out.bin", "--quiet", "--group-size", "32"]
    parent = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True,
                              preexec_fn=default_signals)  # fmt: skip
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    while not children.read_text():
        assert parent.poll() is None
        time.sleep(0.01)
    parent.send_signal(number)  # to the exporter alone
    _, stderr = parent.communicate(timeout=300)
    assert (parent.returncode, stderr.count("\n")) == (code, 1)
    with pytest.raises(ProcessLookupError):
        for _ in range(2000):  # a child that was killed is in its group until init has noticed
            os.killpg(parent.pid, 0)
            time.sleep(0.05)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_whole_run_of_a_broken_directory(model, tmp_path):
    """What the other tests do in this process, once as a command."""
    (model / "config.json").write_text("[" * 100_000)
    done = launch_export("q8", model, tmp_path / "out.bin", "--quiet")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"export: {model / 'config.json'}: is nested too deeply\n"


NOT_NUMBERS = {"signaling NaN": 0x7F90, "quiet NaN": 0x7FC1, "infinity": 0xFF80, "too large for fp16": 0x7F7F}


@pytest.mark.parametrize("bits", NOT_NUMBERS.values(), ids=NOT_NUMBERS)
@pytest.mark.parametrize("scheme", [Q8, W8A8, AWQ, ("gptq", "--rtn"),
                                    ("gptq", "--calib", str(CALIBRATION), "--samples", "2", "--seq-len", "32")],
                         ids=lambda scheme: " ".join(map(str, scheme[:2])))  # fmt: skip
def test_bits_that_are_no_usual_numbers_are_one_line_or_none(model, tmp_path, scheme, bits):
    """numpy warns of some of them on its way, which says nothing that the refusal does not say better."""
    for path in model.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if "layers.0.input_layernorm" in name:
                tensors[name].view(np.uint16)[0] = bits
        save_file(tensors, path)
    code, lines = exported(scheme, model, tmp_path / "out.bin")
    assert code == 0 or len(lines) == 1, lines
    assert not [line for line in lines if "encountered" in line]
