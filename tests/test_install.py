"""make install: programs, and manual pages and completions, which are made of what --help prints."""

import os
import re
import shlex
import shutil
import subprocess
from functools import partial

import pytest

from tests.helpers import ROOT
from tools.manual import bash, manual, parse, zsh

PROGRAMS = tuple(path.stem for path in sorted(ROOT.glob("runq*.c*")))


def help_of(program):
    return subprocess.run([ROOT / program, "--help"], capture_output=True, text=True, check=True).stdout


def options_of(program):
    """Names of options as the help has them, without tools/manual.py."""
    return re.findall(r"(?m)^  (?:-\w, |    )(--[\w-]+)", help_of(program))


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_option_is_taken_over(program):
    found = parse(help_of(program))
    options = [option for *_, group in found.groups for option in group]
    assert found.name == program
    assert [option.name for option in options] == options_of(program)
    assert len(options) > 20
    assert len(found.groups[0][2]) == 6  # the usual ones come first
    assert all(option.text for option in options)
    assert {option.name: option.choices for option in options}["--kv" if program != "runq_awq" else "--mode"] == (
        ["f32", "f16", "q8"] if program != "runq_awq" else ["generate", "chat"]
    )
    page = manual(found, "0")
    words, completions = bash(found), zsh(found)
    for option in options:
        assert option.name.replace("-", r"\-") in page
        assert option.name in words
        assert f"'{option.name}[" in completions


def test_a_help_of_another_form_is_refused():
    text = help_of("runq").replace("  -n, --steps N ", "  -n --steps N ")
    with pytest.raises(ValueError, match="runq: not a line of an option: '  -n --steps N"):
        parse(text)


def test_completion_for_bash(tmp_path):
    def complete(*words, folder=ROOT):
        script = f"{bash(parse(help_of('runq_gptq')))}\nCOMP_WORDS=(runq_gptq {shlex.join(words)})\n"
        script += f"COMP_CWORD={len(words)}\n_runq_gptq\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=folder)
        assert done.stderr == ""
        return done.stdout.splitlines()

    assert complete("--ba") == ["--backend"]
    assert complete("-m", "ch") == ["chat"]
    assert complete("--kv", "") == ["f32", "f16", "q8"]
    assert complete("--backend", "") == ["auto", "builtin"]
    assert complete("-n", "") == [""]
    assert "README.md" in complete("READ")
    assert "README.md" in complete("-f", "READ")
    names = ("my file.bin", 'my "q" file.bin', "it's*.bin", "its.bin")
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "a folder").mkdir()
    assert sorted(complete("", folder=tmp_path)) == sorted([*names, "a folder"])
    for typed, name in ((r"my\ f", names[0]), ('"my f', names[0]), ("'my f", names[0]), (r"it\'s\*", names[2])):
        assert complete("-f", typed, folder=tmp_path) == [name]
    assert complete("--trace", "a", folder=tmp_path) == ["a folder"]


def test_completion_for_zsh():
    if shutil.which("zsh") is None:
        pytest.skip("needs zsh")
    subprocess.run(["zsh", "-n"], input=zsh(parse(help_of("runq_gptq"))), text=True, check=True)


def test_the_manual_page_has_no_warning():
    if shutil.which("groff") is None:
        pytest.skip("needs groff")
    page = manual(parse(help_of("runq")), "runq 0.1.0")
    done = subprocess.run(
        ["groff", "-man", "-Tascii", "-ww", "-P-c"], input=page, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    text = re.sub(r".\x08", "", done.stdout)
    assert re.search(r"-n, --steps N\n +new tokens, in chat for each turn", text)


@pytest.mark.parametrize(
    "where", [["DESTDIR={folder}", "PREFIX=/opt/runq"], ["PREFIX=~/opt/runq"], ["DESTDIR=~", "PREFIX=/opt/runq"]]
)
def test_install_and_uninstall(tmp_path, where):
    """Into folders that a shell has not expanded, too."""
    folder = tmp_path / "a b"
    folder.mkdir()
    make = ["make", "--no-print-directory", *(text.format(folder=folder) for text in where)]
    run = partial(subprocess.run, cwd=ROOT, check=True, capture_output=True, env=os.environ | {"HOME": str(folder)})
    run([*make, "install"])
    commands = run([*make, "-n", "install"], text=True).stdout
    assert "build/" not in commands[commands.index("install -d") :]  # which may be somebody else's by then
    files = {str(path.relative_to(folder / "opt" / "runq")) for path in folder.rglob("*") if path.is_file()}
    share = ("man/man1/{}.1", "bash-completion/completions/{}", "zsh/site-functions/_{}")
    names = ("bin/{}", *(f"share/{name}" for name in share))
    assert files == {name.format(program) for program in PROGRAMS for name in names}
    done = subprocess.run([folder / "opt/runq/bin/runq", "-V"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("runq ")
    run([*make, "uninstall"])
    assert not any(path.is_file() for path in folder.rglob("*"))
