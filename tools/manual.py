"""Manual pages and completions of the programs, made of what they print with --help.

    python3 tools/manual.py FOLDER PROGRAM...

writes FOLDER/man/man1/NAME.1, FOLDER/bash/NAME and FOLDER/zsh/_NAME for each program, which is run with --help and
--version. Needs nothing but Python.
"""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

FILE_ARGUMENTS = ("PATH",)  # of which a shell completes names of files
CHOICES = {"--mode": ["generate", "chat"], "--think": ["0", "1"]}  # that the help has in a sentence


@dataclass
class Option:
    """A line of the help: "-n, --steps N         new tokens"."""

    short: str  # "-n", or empty
    name: str  # "--steps"
    argument: str  # "N", or empty
    text: str
    choices: list[str] = field(default_factory=list)


@dataclass
class Help:
    """What a program prints with --help. `groups`: the title of each, what stands behind it in brackets, options."""

    name: str
    summary: str
    groups: list[tuple[str, str, list[Option]]]
    notes: str


def parse(text: str) -> Help:
    """The help of a program. Raises ValueError for a line that has another form."""
    head, usage, *parts = text.strip().split("\n\n")
    name, summary = head.split(": ", 1)
    if not usage.startswith("usage: "):
        raise ValueError(f"{name}: no line of usage, but {usage!r}")
    *parts, notes = parts
    groups: list[tuple[str, str, list[Option]]] = []
    for part in parts:
        lines = part.splitlines()
        title = ""
        while lines and not lines[0].startswith(" "):
            title += " " + lines.pop(0)
        options: list[Option] = []
        for line in lines:
            start = re.match(r"^(?:  (-\w), |      )(--[\w-]+)(?: (\S+))?(?: +(.*))?$", line)
            if start and not line.startswith(" " * 24):
                short, long, argument, rest = (word or "" for word in start.groups())
                options.append(Option(short, long, argument, rest, list(CHOICES.get(long, []))))
            elif line.startswith(" " * 24) and options:
                options[-1].text = f"{options[-1].text} {line.strip()}".strip()
            else:
                raise ValueError(f"{name}: not a line of an option: {line!r}")
        for option in options:  # "numbers of the KV cache: f32 (default), f16, q8"
            listed = re.search(r": (\w+) \(default\), (.+)$", option.text)
            if listed:
                option.choices = [listed[1], *(word for word in listed[2].split(", ") if re.fullmatch(r"\w+", word))]
                option.argument = option.argument or "|".join(option.choices)
        found = re.fullmatch(r" (.*?)(?: \((.*)\))?", title, re.S)
        groups.append((found[1], found[2] or "", options))
    return Help(name, summary, groups, notes)


def escaped(text: str) -> str:
    """For troff: no hyphens that a terminal shows as another character, no line that begins a request."""
    return re.sub(r"(?m)^([.'])", r"\\&\1", text.replace("\\", r"\e").replace("-", r"\-"))


def manual(found: Help, version: str) -> str:
    """A page for man."""
    lines = [f'.TH {found.name.upper()} 1 "" "{version}"', ".SH NAME", escaped(f"{found.name} - {found.summary}")]
    lines += [".SH SYNOPSIS", f".B {found.name}", r"\fImodel.bin\fR [options]", ".SH OPTIONS"]
    for title, remark, options in found.groups:
        lines += [f".SS {escaped(title)}", *([escaped(remark[0].upper() + remark[1:] + ".")] if remark else [])]
        for option in options:
            names = ", ".join(rf"\fB{escaped(name)}\fR" for name in (option.short, option.name) if name)
            lines += [".TP", names + (rf" \fI{escaped(option.argument)}\fR" if option.argument else "")]
            lines.append(escaped(option.text))
    lines += [".SH NOTES", escaped(found.notes.strip())]
    return "\n".join(lines) + "\n"


# Names of files, a line each. Quotes that were typed do not belong to a name; readline adds those that it needs. macOS
# has bash 3.2.
BASH_FILES = r"""    word=${word//\\} word=${word#[\'\"]}
    while IFS= read -r name; do COMPREPLY+=("$name"); done < <(compgen -f -- "$word")
"""


def bash(found: Help) -> str:
    """Completion for bash."""
    options = [option for *_, group in found.groups for option in group]
    function = f"_{found.name}"
    cases = ""
    for option in options:
        names = "|".join(name for name in (option.short, option.name) if name)
        if option.choices:
            cases += f'    {names}) COMPREPLY=($(compgen -W "{" ".join(option.choices)}" -- "$word")); return ;;\n'
        elif option.argument in FILE_ARGUMENTS:
            cases += f"    {names}) ;;\n"
        elif option.argument:
            cases += f"    {names}) return ;;\n"
    words = " ".join(option.name for option in options)
    return (
        f"# Completion of {found.name} for bash\n{function}() {{\n    local word=${{COMP_WORDS[COMP_CWORD]}} name\n"
        f'    COMPREPLY=()\n    case "${{COMP_WORDS[COMP_CWORD - 1]}}" in\n{cases}    *)\n'
        f'        if [[ $word == -* ]]; then COMPREPLY=($(compgen -W "{words}" -- "$word")); return; fi ;;\n'
        f"    esac\n{BASH_FILES}}}\ncomplete -o filenames -F {function} {found.name}\n"
    )


def zsh(found: Help) -> str:
    """Completion for zsh."""
    lines = [f"#compdef {found.name}", "_arguments -s \\"]
    for *_, options in found.groups:
        for option in options:
            text = re.sub(r"([\[\]:'])", "", re.split(r"; | \(", option.text)[0])
            action = ""
            if option.argument:
                what = f"({' '.join(option.choices)})" if option.choices else ""
                what = "_files" if option.argument in FILE_ARGUMENTS else what
                action = f":{re.sub(r'[^A-Za-z]', ' ', option.argument).strip() or 'value'}:{what or ' '}"
            for name in (option.short, option.name):
                if name:
                    lines.append(f"    '{name}[{text}]{action}' \\")
    return "\n".join([*lines, "    '1:model file:_files'"]) + "\n"


def main(folder: Path, programs: list[Path]) -> None:
    """Writes the three files of each program."""
    for program in programs:
        said = [
            subprocess.run([program.absolute(), option], capture_output=True, text=True, check=True).stdout
            for option in ("--help", "--version")
        ]
        found = parse(said[0])
        for path, text in (
            (folder / "man" / "man1" / f"{found.name}.1", manual(found, said[1].strip())),
            (folder / "bash" / found.name, bash(found)),
            (folder / "zsh" / f"_{found.name}", zsh(found)),
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: python3 tools/manual.py FOLDER PROGRAM...")
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
