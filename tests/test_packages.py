"""What a person reads who lacks packages, a compiler, Python or a network: tools/*.sh, and what make hands to them.

The scripts run with commands of this test in the place of apt-get, sudo, python3 and so on. make test-fresh is the
same on real systems.
"""

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from tarfile import TarFile, TarInfo

import pytest
from packaging.specifiers import SpecifierSet

from tests.helpers import ROOT
from tests.pages import source_files
from tests.test_docs import DOCUMENTS, blocks
from tools.library_sources import unpack

COREUTILS = ("sh", "cat", "cp", "env", "grep", "head", "ls", "mkdir", "sed", "tail", "touch", "tr", "true")

# A Python of some version, with or without ensurepip, whose pip prints a file of the test.
PYTHON = """
case "$*" in
-V) echo Python 3.{minor}.1 ;;
*"import sys, pip"*) {pip} ;;
*ensurepip*) [ {minor} -ge 11 ] && {ensurepip} ;;
*version_info*) [ {minor} -ge 11 ] ;;
"-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" && echo "#!$PWD/$4/bin/python" > "$4/bin/pip" ;;
"-m pip install "*) cat "{log}" >&2; [ ! -s "{log}" ] ;;
*) exit 9 ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
    """A machine that has the commands of this test, and a way to run a script of tools/ on it."""
    return Machine(tmp_path)


class Machine:
    def __init__(self, folder):
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        (folder / "pip.txt").touch()
        (folder / "requirements.lock").touch()
        (folder / "tools").symlink_to(ROOT / "tools")
        for name in COREUTILS:
            (self.bin / name).symlink_to(shutil.which(name))
        self.has("id", "echo 1000")
        self.has("apt-get", "exit 100")
        self.has("dpkg", "exit 1")
        self.knows()

    def has(self, name, script="exit 0"):
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def has_python(self, name, minor, ensurepip="true", pip="false"):
        self.has(name, PYTHON.format(minor=minor, ensurepip=ensurepip, pip=pip, log=self.folder / "pip.txt"))

    def knows(self, *packages):
        """Those that apt can find."""
        self.has("apt-cache", f'case " {" ".join(packages)} " in *" $2 "*) echo "Package: $2" ;; *) exit 100 ;; esac')

    def runs(self, script, *arguments, stderr=subprocess.PIPE, **variables):
        return subprocess.run(
            [self.bin / "sh", f"tools/{script}", *arguments],
            cwd=self.folder,
            env={"PATH": str(self.bin), **variables},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def says(self, script, *arguments, **variables):
        """The one line that a script fails with. Whether apt has lists depends on this machine."""
        done = self.runs(script, *arguments, **variables)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.endswith("\n")
        assert done.stderr.count("\n") == 1
        return re.sub(r"(sudo )?apt-get update && ", "", done.stderr[:-1])


def test_a_user_without_sudo_is_given_a_line_for_root(machine):
    machine.has_python("python3", 11, ensurepip="false")
    machine.knows("g++", "python3-venv")
    line = machine.says("install.sh", "g++", "pkg-config", "libpcre2-dev", "python3-venv", "libsimde-dev")
    assert line == (
        "packages are missing; please type as root: "
        "apt-get install -y g++ pkg-config libpcre2-dev python3-venv libsimde-dev"
    )


def test_a_user_whom_sudo_refuses_is_given_a_line_with_it(machine):
    machine.has("sudo", "echo 'sudo: a password is required' >&2; exit 1")
    done = machine.runs("install.sh", "pkg-config")
    first, line = done.stderr.splitlines()
    assert first == "installing: pkg-config"
    assert re.fullmatch(r"packages are missing; please type: sudo (apt-get .*)?apt-get install -y pkg-config", line)
    assert done.returncode == 1


def test_root_is_given_a_line_without_sudo_when_apt_fails(machine):
    machine.has("id", "echo 0")
    machine.has("sudo")
    machine.has("apt-get", "echo 'E: Unable to locate package pkg-config' >&2; echo 'E: more' >&2; exit 100")
    done = machine.runs("install.sh", "pkg-config")
    first, line = done.stderr.splitlines()
    assert first == "installing: pkg-config"
    assert line.startswith("apt-get: E: Unable to locate package pkg-config; please type: apt-get ")
    assert line.endswith("apt-get install -y pkg-config")
    assert done.returncode == 1


@pytest.mark.parametrize("user", ["root", "sudo"])
def test_packages_are_installed_where_that_is_allowed(machine, user):
    log = machine.folder / "apt.txt"
    machine.has("apt-get", f'echo "$DEBIAN_FRONTEND apt-get $*" >> {log}')
    machine.has("id", f"echo {0 if user == 'root' else 1000}")
    if user == "sudo":
        machine.has("sudo", 'exec "$@"')
    done = machine.runs("install.sh", "pkg-config", "libsimde-dev")
    assert (done.returncode, done.stderr) == (0, "installing: pkg-config libsimde-dev\n")
    lines = log.read_text().splitlines()
    assert lines[-1].startswith("noninteractive apt-get install -y ")
    assert lines[-1].endswith(" pkg-config libsimde-dev")


def test_sudo_asks_once_after_what_is_to_be_installed_was_said(machine):
    """Though it asks for a password at every call, and apt has to get its lists first."""
    seen, lists = machine.folder / "seen.txt", machine.folder / "lists"
    machine.has("sudo", f'echo "password of $(id -u):" >> {seen}; exec "$@"')
    machine.has("apt-get", f'[ "$1" = update ] && touch {lists}; [ -e {lists} ] || exit 100; echo "$1" >> {seen}')
    with seen.open("a") as standard_error:
        done = machine.runs("install.sh", "pkg-config", stderr=standard_error)
    assert done.returncode == 0
    assert seen.read_text().splitlines() == ["installing: pkg-config", "password of 1000:", "update", "install"]


def test_nothing_is_asked_for_that_is_there(machine):
    machine.has("g++")
    machine.has("pkg-config")
    machine.has_python("python3", 13)
    done = machine.runs("install.sh", "g++", "pkg-config", "libpcre2-dev", "libutf8proc-dev", "python3-venv")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("compiler", "package"),
    [
        ("g++", "g++"),
        ("c++", "g++"),
        ("g++-14", "g++-14"),
        ("clang++", "clang"),
        ("clang++-19", "clang-19"),
        ("aarch64-linux-gnu-g++", "g++-aarch64-linux-gnu"),
        ("arm-linux-gnueabihf-g++-12", "g++-12-arm-linux-gnueabihf"),
        ("x86_64-linux-gnu-g++", "g++-x86-64-linux-gnu"),
        ("ccache g++ -m64", "g++"),
    ],
)
def test_the_package_of_a_compiler(machine, compiler, package):
    machine.has("ccache")
    machine.knows(package)
    line = machine.says("install.sh", "g++", CXX=compiler)
    assert line == f"packages are missing; please type as root: apt-get install -y {package}"


@pytest.mark.parametrize("compiler", ["clangg++", "g+++", "/opt/llvm/bin/clang++", "aarch64-gnu-g++"])
def test_a_compiler_that_is_in_no_package(machine, compiler):
    line = machine.says("install.sh", "pkg-config", "g++", CXX=compiler)
    assert line == f"the compiler '{compiler}' is not found (CXX={compiler})"


def test_the_runtime_of_a_clang_that_is_not_there_yet(machine):
    machine.has("apt-cache", "echo '  Depends: clang-19'")
    line = machine.says("install.sh", "clang", "libclang-rt-dev")
    assert line.endswith("apt-get install -y clang libclang-rt-19-dev")


def test_another_python_does_where_python3_is_too_old(machine):
    machine.has_python("python3", 10)
    machine.has_python("python3.12", 12, ensurepip="false")
    machine.has_python("python3.11", 11)
    done = machine.runs("python.sh")
    assert (done.returncode, done.stdout) == (0, "python3.11\n")


def test_another_python_is_asked_for_where_python3_is_too_old(machine):
    machine.has_python("python3", 10)
    machine.knows("python3-venv", "python3.11-venv")
    line = machine.says("install.sh", "python3-venv")
    assert line == "packages are missing; please type as root: apt-get install -y python3.11-venv"


@pytest.mark.parametrize("python", ["python3", "/usr/bin/python3.10"])
def test_python_is_too_old(machine, python):
    machine.has_python("python3", 10)
    machine.knows("python3-venv")
    if python != "python3":
        python = str(machine.bin / "python3")
    line = machine.says("install.sh", "python3-venv", PYTHON=python)
    assert line == (
        f"Python 3.11 or newer is needed, and {python} is Python 3.10.1; "
        "with another, type: make PYTHON=/path/to/python3.11"
    )


@pytest.mark.parametrize(
    ("python", "line"),
    [
        ("pyhton3", "PYTHON=pyhton3 is not found"),
        ("own", "PYTHON=own has no modules venv and ensurepip"),
        ("python3.12", "packages are missing; please type as root: apt-get install -y python3.12-venv"),
    ],
)
def test_a_python_that_was_named(machine, python, line):
    machine.has_python("python3", 11)
    machine.has_python("own", 11, ensurepip="false")
    machine.knows("python3-venv", "python3.12-venv")
    assert machine.says("install.sh", "python3-venv", PYTHON=python) == line


RETRY = """\
WARNING: Retrying (Retry(total={})) after connection broken by 'NewConnectionError('<urllib3 object at 0x7f>: \
Failed to establish a new connection: [Errno -3] Temporary failure in name resolution')': /simple/numpy/
"""
NO_VERSION = "ERROR: Could not find a version that satisfies the requirement numpy==9 (from versions: {})"


@pytest.mark.parametrize(
    ("printed", "line"),
    [
        (
            RETRY.format(4) + RETRY.format(3) + NO_VERSION.format("none") + "\nERROR: No matching distribution\n",
            "pip reaches no package index ([Errno -3] Temporary failure in name resolution); "
            "once there is a network, type: make run",
        ),
        (
            NO_VERSION.format("1, 2") + "\nERROR: No matching distribution found for numpy==9\n",
            f"pip cannot install requirements.lock: {NO_VERSION.format('1, 2')} (all of it: .venv/pip.log)",
        ),
        (
            "ERROR: Ignored the following versions that require a different python version: 8 Requires-Python >=3.12; "
            "9 Requires-Python >=3.11.5, <4; 9.1 Requires-Python >=3.13\n" + NO_VERSION.format("1, 2") + "\n",
            "pip cannot install requirements.lock: numpy==9 needs Python >=3.11.5, <4, and this is Python 3.11.1 "
            "(all of it: .venv/pip.log)",
        ),
        (
            "ERROR: Ignored the following versions that require a different python version: 8 Requires-Python >=3.12\n"
            + NO_VERSION.format("1, 2")
            + "\n",
            f"pip cannot install requirements.lock: {NO_VERSION.format('1, 2')} (all of it: .venv/pip.log)",
        ),
        (
            "Traceback:\nOSError: disk\n",
            "pip cannot install requirements.lock: OSError: disk (all of it: .venv/pip.log)",
        ),
    ],
)
def test_an_environment_without_its_packages_is_not_ready(machine, printed, line):
    machine.has_python("python3", 11)
    (machine.folder / "pip.txt").write_text(printed)
    assert machine.says("venv.sh", ".venv", "run") == line
    assert (machine.folder / ".venv/bin/python").exists()
    assert not (machine.folder / ".venv/ready").exists()


def locked(lock):
    """What a lock file has: names as pip compares them, with versions, and the options behind each."""
    text = re.sub(r"(?m)^#.*\n", "", lock.read_text()).replace("\\\n", " ")
    return {name.lower().replace("_", "-"): options for name, *options in (line.split() for line in text.splitlines())}


LOCKS = ("requirements.lock", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tools/**/*.lock")))


@pytest.mark.parametrize("lock", LOCKS)
def test_every_package_is_locked_with_hashes(lock):
    for name, options in locked(ROOT / lock).items():
        assert re.fullmatch(r"[\w.-]+==[\w.]+", name)
        assert options, name
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", option) for option in options), name


@pytest.mark.parametrize(("folder", "all_named"), [(".", True), ("tools/book", False)])
def test_a_lock_has_the_versions_that_are_asked_for(folder, all_named):
    """Of the book, requirements.txt names those alone that are asked for."""
    lines = (ROOT / folder / "requirements.txt").read_text().splitlines()
    versions = {line.lower().replace("_", "-") for line in lines if "==" in line}
    names = locked(ROOT / folder / "requirements.lock").keys()
    assert versions == names if all_named else versions < names


ENVIRONMENTS = (".venv", "build/book-venv", "build/web-venv", "build/zig", "build/hw/yowasp")


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_any_python_3_11_can_have_the_packages(environment):
    """Debian 12 has 3.11.2. A lock does not say which Python its packages need, but what is installed does."""
    found = list(ROOT.glob(f"{environment}/lib/python3*/site-packages/*.dist-info/METADATA"))
    if not found:
        pytest.skip(f"needs {environment}, which make has not set up")
    for path in found:
        needs = re.search(r"(?m)^Requires-Python: *(.*)$", path.read_text(encoding="utf-8"))
        assert needs is None or SpecifierSet(needs[1]).contains("3.11.0"), path.parent.name


# Whatever fetches something. Debian's packages are not meant: apt compares them with signatures.
FETCHES = re.compile(
    r"""\bpip[\w.]*["', ].*\b(install|download)\b|\buv\b.*\b(pip|add|tool)\b|extra-index|find-links"""
    r"""|\b(npm|npx|yarn|pnpm|gem|cargo|go|conda) (install|add|get)\b|playwright install|docker pull"""
    r"""|\b(wget|curl|aria2c)\b|git["', ]+clone|urlopen|urlretrieve|http\.client|\b(requests|httpx)\.\w+\("""
    r"""|\bhf\b.*\bdownload\b|snapshot_download|hf_hub_download"""
)

# How lines begin that do, but for those that tell pip to compare with hashes: by file, with the reason.
FETCHED_OTHERWISE = {
    "formats/checkpoint.py": {'command = f".venv/bin/hf download': "printed, for a person to type"},
    "formats/interpreter.py": {'f".venv-torch/bin/pip install -r requirements.txt': "printed, for a person to type"},
    "models/smollm2.py": {"file. Only that file is taken out of it;": "a docstring"},
    "models/train.py": {".venv-torch/bin/pip install -r requirements.txt torch": "a docstring"},
    "tests/autoawq_fixture.py": {"DIR is an unpacked autoawq 0.2.9": "a docstring"},
    "tests/fresh.py": {
        'kept = ("index-url", "extra-index-url",': "what pip asks on the new system is what it asks here",
        'run("git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}"': "of this folder",
        'BOOK = """mkfifo build/served': "of this machine",
    },
    "tests/test_export.py": {'".venv/bin/hf download Qwen': "what an error says, for a person to type"},
    "tests/gptq_fixture.py": {"DIR is an unpacked auto-gptq 0.7.1": "a docstring"},
    "tests/pages.py": {'subprocess.run(["git", "clone", "--quiet", ROOT, to]': "of this folder"},
    "tests/test_book.py": {
        "with urllib.request.urlopen(served + name": "of this machine",
        "urllib.request.urlopen(served + name": "of this machine",
    },
    "tests/test_dist.py": {'subprocess.run(["git", "clone", "--quiet", "--local", ROOT, tree]': "of this folder"},
    "tools/library_sources.py": {"with urllib.request.urlopen(url": "the SHA-256 is compared"},
    "tools/venv.sh": {'echo "pip cannot install': "a message"},
}


def test_whatever_is_fetched_is_compared_with_a_hash():
    """All rules of make, scripts and modules but this one tell pip so; other lines that fetch are listed above."""
    files = ["Makefile", ".ci/run", *(f for f in source_files() if re.match(r"(mk|tools)/|.*\.(py|sh)$", f))]
    assert len(files) > 200
    found = {}
    for name in sorted({*files} - {"tests/test_packages.py"}):
        lines = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
        if not name.endswith(".py"):
            lines = [line for line in lines if not line.startswith("#")]
        for line in lines:
            if FETCHES.search(line) and "--require-hashes" not in line:
                found.setdefault(name, []).append(line.strip())
    for name, lines in found.items():
        for line in lines:
            assert any(map(line.startswith, FETCHED_OTHERWISE.get(name, ()))), f"{name}: {line}"
    assert found.keys() == FETCHED_OTHERWISE.keys()


@pytest.mark.parametrize("page", DOCUMENTS, ids=str)
def test_what_a_page_installs_goes_into_an_environment_of_the_reader(page):
    """And not into one that `make` sets up of a lock file."""
    for block in blocks((ROOT / page).read_text(encoding="utf-8")):
        for line in block.text.splitlines() if block.language == "sh" else ():
            assert not re.search(r"\bpip[\d.]* ", line) or re.match(r"\.venv-\w+/bin/pip install ", line), line


def test_the_page_of_licences_is_that_of_these_packages(tmp_path):
    page = ROOT / "docs" / "licences.md"
    anew = tmp_path / "licences.md"
    shutil.copy(page, anew)
    subprocess.run([sys.executable, ROOT / "tools" / "licences.py", anew], check=True)
    assert anew.read_text() == page.read_text()
    assert "| not said |" not in page.read_text()


@pytest.mark.parametrize("right", [True, False])
def test_a_package_that_is_another_one_is_not_installed(tmp_path, right):
    """By the real pip, from a folder in place of the index."""
    wheel = tmp_path / "wheels" / "tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    files = {"tiny.py": "", "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
             "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
             "tiny-1.0.dist-info/RECORD": ""}  # fmt: skip
    with zipfile.ZipFile(wheel, "w") as package:
        for name, text in files.items():
            package.writestr(name, text)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest() if right else "0" * 64
    (tmp_path / "requirements.lock").write_text(f"tiny==1.0 --hash=sha256:{digest}\n")
    environment = os.environ | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheel.parent),
                                "PYTHON": sys.executable}  # fmt: skip
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    done = subprocess.run(["sh", "tools/venv.sh", ".venv", "run"], cwd=tmp_path, env=environment, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert (tmp_path / ".venv" / "ready").exists() == right
    assert done.returncode == (0 if right else 1)
    if not right:
        assert re.fullmatch(
            r"pip cannot install requirements\.lock: ERROR: THESE PACKAGES DO NOT MATCH.*\n", done.stderr
        )


@pytest.mark.parametrize(("whole", "made_in"), [(True, "."), (False, "."), (True, "elsewhere")])
def test_an_environment_is_made_anew_where_it_is_not_whole(machine, whole, made_in):
    """Or where it was moved: programs in bin name the folder that they were made in."""
    machine.has_python("python3", 11)
    own = machine.folder / ".venv/bin"
    own.mkdir(parents=True)
    (own / "pip").write_text(f"#!{machine.folder / made_in}/.venv/bin/python3\n")
    machine.has_python("python", 11, pip="true" if whole else "false")
    (machine.bin / "python").rename(own / "python")
    before = (own / "python").read_text() + "# from before\n"
    (own / "python").write_text(before)
    done = machine.runs("venv.sh", ".venv", "")
    assert (done.returncode, done.stderr) == (0, "")
    assert (machine.folder / ".venv/ready").exists()
    assert ((own / "python").read_text() == before) == (whole and made_in == ".")


def make(tree, *arguments):
    command = ["make", "--no-print-directory", "-n", *arguments]
    return subprocess.run(command, cwd=tree, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def tree(tmp_path):
    """A new copy of the repository, nothing built."""
    for entry in ROOT.iterdir():
        if entry.name not in ("build", ".venv"):
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


# Goals that take no packages.
NOTHING = {
    "clean",
    "uninstall",
    "help",
    "sections",
    "cuda",
    "gpu-check",
    "ptx",
    "serve-python",
    "test-fresh",
    "test-says",
}


@pytest.mark.parametrize("nvcc", ["true", "no-nvcc"])
def test_a_goal_asks_for_all_its_packages_at_once_and_first(tree, nvcc):
    """What is asked for later is in the first request, and nothing is compiled or fetched before it."""
    nothing = NOTHING if nvcc == "true" else NOTHING | {"test-ptx", "cuda-cublas"}
    goals = re.search(r"^\.PHONY: (.*)$", make(tree, "-p", "help"), re.M)[1].split()
    assert {"all", "run", "test", "test-all", "lint", "web", "dist", "windows", "book"} <= set(goals)
    for goal in (*goals, "runq", "model.bin", "runq model.bin", "runq_awq model_awq.bin book", ".venv/bin/python"):
        lines = make(tree, *goal.split(), f"NVCC={nvcc}").splitlines()
        requests = [(i, set(found[1].split())) for i, line in enumerate(lines)
                    if (found := re.search(r"tools/install\.sh ([^&|;\n]*)", line))]  # fmt: skip
        assert bool(requests) == (goal not in nothing), goal
        for first, packages in requests[:1]:
            assert set().union(*(later for _, later in requests)) <= packages, goal
            work = [line for line in lines[:first] if not re.match(r" *(mkdir|echo|grep|cmp|rm|\[|\{) ", line)]
            assert work == [] or goal == "serve-check", goal  # that looks at a Python that it is given
        assert not (tree / "build/packages").exists()


@pytest.mark.parametrize("filters", [True, False])
def test_sources_are_unpacked_by_any_python_3_11(tmp_path, monkeypatch, filters):
    """Before 3.11.4 tarfile knows no filters."""
    if not filters:
        monkeypatch.delattr("tarfile.data_filter", raising=False)
        extract = TarFile.extractall
        monkeypatch.setattr(TarFile, "extractall", lambda tar, path: extract(tar, path))
    archive = io.BytesIO()
    with TarFile.open(fileobj=archive, mode="w:gz") as tar:
        tar.addfile(TarInfo("pcre2-10.42/README"))
    unpack(archive.getvalue(), tmp_path / "pcre2")
    assert [path.name for path in tmp_path.rglob("*")] == ["pcre2", "README"]


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize(("python", "made_in"), [("sh", "."), ("gone", "."), ("sh", "elsewhere")])
def test_an_environment_that_was_moved_or_whose_python_has_gone_is_set_up_again(tree, environment, python, made_in):
    """By a make whose folder is known by another name, too: .venv may be a link."""
    own = tree / "real" / environment
    (own / "bin").mkdir(parents=True)
    (own / "bin/python").symlink_to(shutil.which(python) or python)
    (own / "bin/pip").write_text(f"#!{tree / 'real' / made_in / environment}/bin/python3\n")
    (own / "ready").touch()
    (tree / environment).parent.mkdir(parents=True, exist_ok=True)
    (tree / environment).symlink_to(own)
    assert ("tools/venv.sh" in make(tree, f"{environment}/ready")) == ((python, made_in) != ("sh", "."))
