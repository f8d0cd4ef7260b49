"""README's first commands on new, minimal Debian systems, as people have them who read it: make test-fresh

    python3 tests/fresh.py [bookworm] [trixie]

Each system is debootstrap's smallest, with git, make and ca-certificates added. It takes mirror, proxies, pip's index
and certificates from the machine that this runs on. An unprivileged user has cloned HEAD and types what README says:

    with sudo       `make run` installs what is missing and tells a story; so do the commands that follow it. The book
                    is served, and `make chat` knows the capital of France. With FULL=1 in the environment `make test`
                    has 0 failures, which takes longer than all else
    without sudo    `make run` prints one line. Once root has typed what it says, `make run` tells a story

On Debian 12, which .github/workflows names, root types the shell steps of pages.yml, and the book is there; with FULL=1
those of test.yml, too.

The output has no warnings, and nothing outside the tree changes. Where this cannot run, it says why and exits with 1.
The systems are in build/fresh, with logs of what was printed; what is downloaded or made once is kept in
$XDG_CACHE_HOME/runq-fresh, or ~/.cache/runq-fresh.
"""

import configparser
import hashlib
import inspect
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "fresh"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "runq-fresh"
SUITES = {"bookworm": "Debian 12", "trixie": "Debian 13"}
PACKAGES = ("ca-certificates", "git", "make")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
USER, UID = "ada", 1000
TREE = Path("home") / USER / "runq"
APART = {"make test", "make chat"}  # of README's commands: what they print is no story
TEST = f"make -j{len(os.sched_getaffinity(0))} test"
CHAT = "echo 'What is the capital of France?' | make chat"
# The server prints where it is, and ends with the shell, as does make, which for -j may have a file in /tmp.
BOOK = """mkfifo build/served && { MAKEFLAGS= make book-serve PORT=0 > build/served & } && \
url=$(sed -n '/^http/{s/ .*//;p;q}' build/served) && \
python3 -c 'import sys, urllib.request as r; print(r.urlopen(sys.argv[1]).read().decode())' "$url" """
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


class FreshError(Exception):
    """What a system did not do as it should."""


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """A command's result; one that fails ends the test with what it printed."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        raise FreshError(f"{shlex.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done


# ----------------------------------------------------------------------------
# This machine's way to packages


def apt_settings() -> str:
    """Of apt's configuration what says how files are fetched, without hooks that the new system does not have."""
    lines = run("apt-config", "dump").stdout.splitlines()
    return "".join(f"{line}\n" for line in lines if line.startswith("Acquire::") and "Auto-Detect" not in line)


def mirror_of(suite: str) -> str | None:
    """The first of this machine's mirrors that has the suite, or else Debian's own."""
    uris = run("apt-get", "indextargets", "--format", "$(REPO_URI)").stdout.split()
    for uri in dict.fromkeys([*(uri.rstrip("/") for uri in uris), "http://deb.debian.org/debian"]):
        probe = ["/usr/lib/apt/apt-helper", "download-file", f"{uri}/dists/{suite}/InRelease", WORK / "InRelease"]
        if subprocess.run(probe, capture_output=True).returncode == 0:
            return uri
    return None


def environment() -> dict[str, str]:
    """Proxies of this machine; those that only apt knows, too."""
    found = {name: os.environ[name] for name in PROXIES if name in os.environ}
    for scheme in ("http", "https"):
        setting = re.search(rf'^Acquire::{scheme}::Proxy "(?!DIRECT)(.+)";$', apt_settings(), re.M)
        if setting:
            found.setdefault(f"{scheme}_proxy", setting[1])
    return found


def pip_settings() -> str:
    """Of pip's configuration what says where packages come from, as a file; not folders of this machine."""
    settings = {}
    for path in ("/etc/pip.conf", Path.home() / ".pip/pip.conf", Path.home() / ".config/pip/pip.conf"):
        parser = configparser.RawConfigParser()
        parser.read(path)
        settings |= dict(parser["global"]) if "global" in parser else {}
    settings |= {name[4:].lower().replace("_", "-"): os.environ[name] for name in os.environ if name.startswith("PIP_")}
    kept = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout", "cert")
    lines = [f"{name} = {value}\n" for name, value in settings.items() if name in kept and "file:" not in value]
    return "".join(["[global]\n", *lines])


# ----------------------------------------------------------------------------
# Systems


def inside(
    system: Path, command: str, user: str = "root", network: bool = True, folder: str = "/"
) -> subprocess.CompletedProcess[str]:
    """What a shell's command does on a system. Its mounts and processes end with it."""
    home = "/root" if user == "root" else f"/home/{user}"
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    variables = {"HOME": home, "USER": user, "LANG": "C.UTF-8", "PATH": path, **environment()}
    variables["MAKEFLAGS"] = f"-j{len(os.sched_getaffinity(0))}"
    mounts = f"""
        set -e
        cd {shlex.quote(str(system))}
        mount -t proc proc proc
        mount -t sysfs -o ro sysfs sys
        mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
        mount -t tmpfs tmpfs dev/shm
        mount --bind {shlex.quote(str(CACHE / system.name.split("-")[0]))} var/cache/apt/archives
        mount --bind {shlex.quote(str(CACHE / "pip"))} home/{USER}/.cache/pip
        exec chroot --userspec={user}:{user} . "$@"
    """
    unshare = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
    return subprocess.run(
        [
            *unshare,
            *([] if network else ["--net"]),
            *("sh", "-c", mounts, "sh", "env", "-i"),
            *(f"{name}={value}" for name, value in variables.items()),
            *("sh", "-c", f"cd {folder} && {command}"),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


def as_root(system: Path, command: str) -> None:
    """What root types, and what has to work."""
    done = inside(system, command)
    if done.returncode:
        raise FreshError(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")


def remove(folder: Path) -> None:
    """Removes a system, and never what is mounted into it."""
    if folder.exists():
        run("rm", "-rf", "--one-file-system", folder)


def base(suite: str, mirror: str) -> Path:
    """A minimal system as an archive: made once, and anew when this machine's way to packages is another."""
    apt, pip = apt_settings(), pip_settings()
    key = hashlib.sha256(repr((mirror, apt, pip, PACKAGES, inspect.getsource(base))).encode()).hexdigest()[:12]
    archive = CACHE / f"{suite}-{key}.tar"
    if archive.exists():
        return archive
    system = WORK / f"{suite}-base"
    remove(system)
    cache = CACHE / suite
    (cache / "partial").mkdir(parents=True, exist_ok=True)
    step(f"{SUITES[suite]} by debootstrap", lambda: run(
        "debootstrap", "--variant=minbase", f"--keyring={KEYRING}", f"--cache-dir={cache}", suite, system, mirror,
        env=os.environ | environment(),
    ))  # fmt: skip
    (system / "etc/apt/sources.list").write_text(f"deb {mirror} {suite} main\n")
    (system / "etc/apt/apt.conf.d/90this-machine").write_text(apt)
    (system / "etc/pip.conf").write_text(pip)
    shutil.copy("/etc/resolv.conf", system / "etc/resolv.conf")
    (system / "etc/hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()}\n{Path('/etc/hosts').read_text()}")
    certificates = Path("/usr/local/share/ca-certificates")
    if certificates.is_dir():
        shutil.copytree(certificates, system / certificates.relative_to("/"), dirs_exist_ok=True)
    (system / f"home/{USER}/.cache/pip").mkdir(parents=True)
    as_root(system, f"useradd --shell /bin/sh --home-dir /home/{USER} {USER} && chown -R {USER}: /home/{USER}")
    as_root(system, f"apt-get update -qq && apt-get install -y -qq --no-install-recommends {' '.join(PACKAGES)}")
    as_root(system, "update-ca-certificates")
    for old in CACHE.glob(f"{suite}-*.tar"):
        old.unlink()
    run("tar", "-C", system, "--numeric-owner", "-cf", archive.with_suffix(".new"), ".")
    archive.with_suffix(".new").rename(archive)
    remove(system)
    return archive


def unpack(suite: str, mirror: str, name: str) -> Path:
    """A new system, with a clone of HEAD in its user's home."""
    archive = base(suite, mirror)
    system = WORK / f"{suite}-{name}"
    remove(system)
    system.with_suffix(".log").unlink(missing_ok=True)
    system.mkdir(parents=True)
    run("tar", "-C", system, "--numeric-owner", "-xf", archive)
    run("git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", system / TREE)
    run("chown", "-R", f"{UID}:{UID}", system / TREE)
    as_root(system, "apt-get update -qq")
    return system


# ----------------------------------------------------------------------------
# What README says


def readme() -> tuple[list[str], str, str]:
    """The commands of `Run it`, then the command whose output is shown, and that output."""
    section = re.search(r"^## Run it$(.*?)^## ", (ROOT / "README.md").read_text(), re.M | re.S)[1]
    commands = "".join(re.findall(r"^```sh\n(.*?)^```$", section, re.M | re.S)).splitlines()
    shown = re.search(r"<!-- output: (.*?) -->\n```text\n(.*?)```", section, re.S)
    return [command for command in commands if command not in APART], shown[1], shown[2]


# ----------------------------------------------------------------------------
# What a user sees


def step(name: str, action: Callable[[], object]) -> None:
    """Does it, and says how long it took."""
    begin = time.monotonic()
    action()
    print(f"  {name}: {time.monotonic() - begin:.0f} s", flush=True)


def contents(system: Path) -> dict[str, tuple[int, ...]]:
    """The state of every file outside the tree, what is put aside for other programs' use apart."""
    own = {str(system / TREE), str(system / "home" / USER / ".cache")}
    found = {}
    for folder, folders, files in os.walk(system):
        folders[:] = [name for name in folders if f"{folder}/{name}" not in own]
        for name in files:
            state = os.lstat(f"{folder}/{name}")
            found[f"{folder}/{name}"] = (state.st_mtime_ns, state.st_size, state.st_mode, state.st_uid)
    return found


def typed(system: Path, command: str, user: str = USER, network: bool = True) -> subprocess.CompletedProcess[str]:
    """A command in the tree. It warns of nothing, and changes nothing outside unless it installs packages."""
    before = contents(system)
    done = inside(system, command, user, network, f"/{TREE}")
    with system.with_suffix(".log").open("a") as log:
        log.write(f"$ {command}\n{done.stdout}{done.stderr}(exit code {done.returncode})\n")
    warnings = [
        line for line in (done.stdout + done.stderr).splitlines() if re.search(r"\bwarning:", line, re.IGNORECASE)
    ]
    if warnings:
        raise FreshError(f"{command}: {len(warnings)} warnings, such as\n{warnings[0]}")
    if "installing:" not in done.stderr:
        after = contents(system)
        changed = [path for path in before | after if before.get(path) != after.get(path)]
        if changed:
            raise FreshError(f"{command} has changed {len(changed)} files outside the tree, such as\n{changed[0]}")
    return done


def works(system: Path, command: str, pattern: str = r"^Once upon a time") -> None:
    """The command prints something like that."""

    def work() -> None:
        done = typed(system, command)
        if done.returncode or not re.search(pattern, done.stdout, re.M):
            why = f"exit code {done.returncode}, expected '{pattern}'"
            raise FreshError(f"{command}: {why}\n{(done.stdout + done.stderr)[-4000:]}")

    step(command.splitlines()[0], work)


def refused(system: Path, command: str, pattern: str, network: bool = True) -> re.Match[str]:
    """The command fails, and beside what make says of it prints one line, which has to look like that."""
    done = typed(system, command, network=network)
    lines = [line for line in done.stderr.splitlines() if not re.match(r"make.*:|setting up ", line)]
    match = re.fullmatch(pattern, lines[0]) if len(lines) == 1 and done.returncode else None
    if not match:
        raise FreshError(f"{command}: exit code {done.returncode}, and not one line like '{pattern}':\n{done.stderr}")
    print(f"  {command}: {lines[0]}", flush=True)
    return match


def with_sudo(suite: str, mirror: str) -> None:
    """Everything that README says, by a user who may become root."""
    system = unpack(suite, mirror, "sudo")
    as_root(system, "apt-get install -y -qq --no-install-recommends sudo")
    rule = system / f"etc/sudoers.d/{USER}"
    rule.write_text(f"{USER} ALL=(ALL) NOPASSWD: ALL\n")
    rule.chmod(0o440)
    commands, shown, output = readme()
    for command in commands:
        works(system, command)
    works(system, shown, "^" + re.escape(output))
    works(system, BOOK, r"<title>.*runq")
    works(system, CHAT, r"\bParis\b")
    if os.environ.get("FULL", "0") not in ("", "0"):
        works(system, TEST, r"^\d+ passed, 0 failed")
    remove(system)


def without_sudo(suite: str, mirror: str) -> None:
    """`make run` by a user who has to ask somebody else to install packages."""
    system = unpack(suite, mirror, "user")
    line = refused(system, "make run", r"packages are missing; please type as root: (apt-get install -y .*)")[1]
    refused(system, "make run CXX=g+++", r"the compiler 'g\+\+\+' is not found \(CXX=g\+\+\+\)")
    step(f"{line} (as root)", lambda: as_root(system, f"DEBIAN_FRONTEND=noninteractive {line}"))
    refused(system, "make model.bin", r"pip reaches no package index .*type: make model.bin", network=False)
    works(system, "make run")
    typed(system, "touch requirements.txt && make model.bin", user="root")
    remove(system)


def as_github(suite: str, mirror: str) -> None:
    """The shell steps of the workflows, of which each is a line."""
    for name in ("pages", *(["test"] if os.environ.get("FULL", "0") not in ("", "0") else [])):
        system = unpack(suite, mirror, name)
        for command in re.findall(r"^ *- run: (.*)$", (ROOT / f".github/workflows/{name}.yml").read_text(), re.M):
            step(command, partial(as_root, system, f"cd /{TREE} && {command}"))
        if name == "pages":
            as_root(system, f"cd /{TREE}/build/book && ls index.html run/index.html")
        remove(system)


def obstacle() -> str | None:
    """Why systems cannot be made here."""
    if os.geteuid() != 0:
        return "it takes root"
    for program in ("debootstrap", "unshare", "apt-get", "git"):
        if not shutil.which(program):
            return f"there is no {program}"
    if not KEYRING.exists():
        return f"there is no {KEYRING} (package debian-archive-keyring)"
    if subprocess.run(["unshare", "--mount", "--pid", "--net", "--fork", "true"], capture_output=True).returncode:
        return "mounts in a name space of its own are not allowed"
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, check=False).returncode:
        return "this is no git repository with a commit"
    return None


def main(suites: list[str]) -> int:
    """Tests systems one after the other, and says which one fails where."""
    unknown = [suite for suite in suites if suite not in SUITES]
    if unknown:
        print(f"unknown suite '{unknown[0]}': {', '.join(SUITES)}", file=sys.stderr)
        return 2
    why = obstacle()
    if not why:
        WORK.mkdir(parents=True, exist_ok=True)
        (CACHE / "pip").mkdir(parents=True, exist_ok=True)
        os.chown(CACHE / "pip", UID, UID)
        mirrors = {suite: mirror_of(suite) for suite in suites or SUITES}
        if None in mirrors.values():
            why = "no package mirror can be reached"
    if why:
        print(f"no new systems were tested: {why}", file=sys.stderr)
        return 1
    if run("git", "status", "--porcelain", cwd=ROOT).stdout:
        print("what is not committed is not tested")
    for suite, mirror in mirrors.items():
        for case in (without_sudo, with_sudo, *([as_github] if suite == "bookworm" else [])):
            print(f"{SUITES[suite]}, {case.__name__.replace('_', ' ')}", flush=True)
            begin = time.monotonic()
            try:
                case(suite, mirror)
            except FreshError as error:
                print(f"failed: {error}", file=sys.stderr)
                return 1
            print(f"  passed in {time.monotonic() - begin:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
