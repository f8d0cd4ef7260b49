"""Programs with a mistake in them, for the page.

    python3 tools/web_variant.py sources VARIANT.json FOLDER     the changed sources
    python3 tools/web_variant.py list OUT.json VARIANT.json...   all of them in one file: {NAME: what it says}

A variant (web/variants/NAME.json) says what it breaks (`title`, `why`), in which program, on which model file of
build/models the break shows, and which step `golden diff` then names first in its trace. In the tests the trace lies
beside the model's golden trace, or, where no value of that shows the mistake, beside the right program's trace of a
`prompt` (`round-half-up`: no tie occurs in the golden trace). The page judges each of them on one story,
VARIANT_PROMPT of web/page_data.py, by a run of the right program.

A variant has edits: lines of a file, and what stands in their place (`scaffold`: why an edit is there that is no
mistake itself); or, if the mistake is in the model file, the options of the export that makes it.

FOLDER gets a changed copy of every file that has edits, under the same path, so that a compiler that looks there first
compiles the variant. Every `old` has to be in its file exactly once: when a source changes, the variant says so, and is
changed with it.
"""

import json
import shutil
import sys
from pathlib import Path


class EditError(Exception):
    """An edit does not fit its file; the text says which, in one line."""


def read_variant(path: Path) -> dict:
    """What a variant says. Raises EditError if it is no such JSON, OSError."""
    try:
        variant = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise EditError(f"{path}: {error}") from None
    if not isinstance(variant, dict) or "edits" not in variant:
        raise EditError(f"{path}: not an object that has edits")
    return variant


def edited(text: str, edit: dict) -> str:
    """A file with one edit made. Raises EditError."""
    old, new = ("".join(line + "\n" for line in edit[which]) for which in ("old", "new"))
    n = ("\n" + text).count("\n" + old)
    if n != 1:
        raise EditError(f"{edit['file']} has these lines {n} times, expected once: {edit['old']}")
    return ("\n" + text).replace("\n" + old, "\n" + new, 1)[1:]


def write_variant(variant: dict, root: Path, out: Path) -> None:
    """Replaces `out` by the changed copies. Raises EditError, and then writes nothing."""
    files: dict[str, str] = {}
    for edit in variant["edits"]:
        name = edit["file"]
        files[name] = edited(files.get(name) or (root / name).read_text(encoding="utf-8"), edit)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, encoding="utf-8")


def main() -> int:
    """Returns the exit code."""
    command, *paths = sys.argv[1:] or [""]
    if command not in ("list", "sources") or len(paths) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        if command == "list":
            out, *variants = map(Path, paths)
            out.write_text(json.dumps({path.stem: read_variant(path) for path in variants}), encoding="utf-8")
        else:
            write_variant(read_variant(Path(paths[0])), Path(), Path(paths[1]))
    except (EditError, OSError) as error:
        print(f"web_variant: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
