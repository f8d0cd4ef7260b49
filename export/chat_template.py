"""Hugging Face chat template -> the literal text around each message.

A chat template is a Jinja program. For a plain conversation, though, the usual ones only put fixed text in
front of and behind each message. That text is found here by rendering the template with sentinels for
contents, and then checked: conversations composed from the pieces (`compose`, which chat_text() in
engine/text/chat_template.h mirrors) must equal the rendered ones. A template that fails the check is not exported.
"""

import itertools
import json
import resource
import signal
import struct
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.sandbox

from formats.errors import ModelError, one_line, shown
from formats.files import read_text

ROOT = Path(__file__).resolve().parent.parent
TRIM_SYSTEM, TRIM_USER, TRIM_ASSISTANT, THINK_BLOCKS, LATE_SYSTEM, TURNS_ONLY, STRIP_ANSWER = 1, 2, 4, 8, 16, 32, 64
DROP_THOUGHTS, FOLD_SYSTEM = 128, 256

Message = dict[str, str]  # {"role": .., "content": ..}


@dataclass
class ChatTemplate:
    """The pieces, in the order of the section. docs/tokenizer.md describes them."""

    no_system: str = ""
    system_prefix: str = ""
    system_suffix: str = ""
    late_system_prefix: str = ""
    late_system_suffix: str = ""
    user_prefix: str = ""
    user_suffix: str = ""
    assistant_prefix: str = ""
    assistant_suffix: str = ""
    generate: str = ""
    generate_no_think: str = ""
    think_open: str = ""
    think_close: str = ""
    flags: int = 0
    differs: str = ""  # what the pieces cannot hold, for a message; it is not in the section

    def to_bytes(self) -> bytes:
        pieces = [getattr(self, f.name).encode("utf-8") for f in fields(self)[:-2]]
        return struct.pack("<I", self.flags) + b"".join(struct.pack("<I", len(p)) + p for p in pieces)

    @classmethod
    def of_bytes(cls, section: bytes) -> "ChatTemplate":
        """The inverse of `to_bytes`."""
        pieces, at = [], 4
        while at < len(section):
            (size,) = struct.unpack_from("<I", section, at)
            pieces.append(section[at + 4 : at + 4 + size].decode("utf-8"))
            at += 4 + size
        return cls(*pieces, flags=int.from_bytes(section[:4], "little"))


def end_of_turn(section: bytes, tokens: Iterable[str]) -> str | None:
    """Which of these tokens ends an answer, by the pieces of a template; None: none does, or there is no template."""
    suffix = ChatTemplate.of_bytes(section).assistant_suffix.lstrip() if section else ""
    return max(filter(suffix.startswith, tokens), key=len, default=None)


class NotLiteralError(Exception):
    """The template does more than put text around messages; str() says what."""


# ----------------------------------------------------------------------------
# Rendering, as transformers does it


class _GenerationBlocks(jinja2.ext.Extension):
    """{% generation %} .. {% endgeneration %}, with which transformers marks answers: the text inside."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


DATE = datetime(2024, 7, 26)  # on which Llama 3.2's template falls back


def compile_template(source: str, with_date: bool = False) -> jinja2.Template:
    """The template in the environment that transformers gives it, but for strftime_now: an exported template must not
    depend on the day. Some that use it have a fixed date to fall back on; others get DATE, with_date."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    if with_date:
        environment.globals["strftime_now"] = DATE.strftime
    return environment.from_string(source)


class Renderer:
    """render(messages, generation_prompt, think) -> text, or None where the template raises an error."""

    def __init__(self, source: str, special_tokens: dict[str, str], with_date: bool = False):
        self.template = compile_template(source, with_date)
        self.special_tokens = special_tokens

    def __call__(self, messages: list[Message], generation_prompt: bool = False, think: bool = True) -> str | None:
        try:
            return self.template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=generation_prompt,
                enable_thinking=think,
                **self.special_tokens,
            )
        except MemoryError:
            raise
        except Exception:  # raise_exception(), or whatever Python makes of an unexpected conversation
            return None


# ----------------------------------------------------------------------------
# The pieces


def compose(chat: ChatTemplate, messages: list[Message], generation_prompt: bool, think: bool) -> str:
    """What the pieces make of a conversation. Raises NotLiteralError where they say nothing about it."""

    def is_tool(content: str) -> bool:
        return content.startswith("<tool_response>") and content.endswith("</tool_response>")

    roles = [m["role"] for m in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if chat.flags & TURNS_ONLY and (not turns or turns != (["user", "assistant"] * len(turns))[: len(turns)]):
        raise NotLiteralError("user and assistant do not take turns")
    users = [
        i
        for i, m in enumerate(messages)
        if m["role"] == "user" and (chat.flags & TURNS_ONLY or not is_tool(m["content"]))
    ]
    out = "" if messages[0]["role"] == "system" else chat.no_system
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "assistant" and chat.flags & DROP_THOUGHTS and "</think>" in content:
            content = content.split("</think>")[-1]
            content = content.lstrip("\n") if chat.flags & STRIP_ANSWER else content
        if chat.flags & {"system": TRIM_SYSTEM, "user": TRIM_USER, "assistant": TRIM_ASSISTANT}[role]:
            content = content.strip()
        if role == "system" and i == 0:
            out += chat.system_prefix + content + chat.system_suffix
        elif role == "system":
            if not chat.flags & LATE_SYSTEM:
                raise NotLiteralError("a system message that is not the first")
            out += chat.late_system_prefix + content + chat.late_system_suffix
        elif role == "user":
            folded = chat.flags & FOLD_SYSTEM and i == 1 and roles[0] == "system"
            out += ("" if folded else chat.user_prefix) + content + chat.user_suffix
        else:
            thoughts = ""
            if chat.flags & THINK_BLOCKS and "</think>" in content:
                before, after = content.split("</think>")[0], content.split("</think>")[-1]
                thoughts = before.rstrip("\n").split("<think>")[-1].lstrip("\n")
                content = after.lstrip("\n")
            if chat.flags & THINK_BLOCKS and users and i > users[-1] and (i + 1 == len(messages) or thoughts):
                content = content.lstrip("\n") if chat.flags & STRIP_ANSWER else content
                content = chat.think_open + thoughts.strip("\n") + chat.think_close + content
            out += chat.assistant_prefix + content + chat.assistant_suffix
    if generation_prompt:
        out += chat.generate if think else chat.generate_no_think
    return out


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _between(text: str | None, *sentinels: str) -> list[str]:
    """The text before, between and behind the sentinels, each of which must stand in it once, in order."""
    if text is None:
        raise NotLiteralError("it refuses a plain conversation")
    parts = []
    for sentinel in sentinels:
        if text.count(sentinel) != 1:
            raise NotLiteralError("a message is not there exactly once")
        before, text = text.split(sentinel)
        parts.append(before)
    return [*parts, text]


def _without(text: str, prefix: str = "", suffix: str = "") -> str:
    if len(text) < len(prefix) + len(suffix) or not (text.startswith(prefix) and text.endswith(suffix)):
        raise NotLiteralError("the text around a message depends on its neighbours")
    return text[len(prefix) : len(text) - len(suffix)]


def find_pieces(render: Renderer) -> ChatTemplate:
    """Reads the pieces off conversations with sentinel contents. Raises NotLiteralError."""
    s, u, a, u2 = "SENTINEL-one", "SENTINEL-two", "SENTINEL-three", "SENTINEL-four"
    system, user, answer, user2 = (
        _message("system", s),
        _message("user", u),
        _message("assistant", a),
        _message("user", u2),
    )
    chat = ChatTemplate()

    before, chat.user_suffix = _between(render([user]), u)
    _, user_to_answer, answer_to_user, _ = _between(render([user, answer, user2]), u, a, u2)
    chat.assistant_prefix = _without(user_to_answer, prefix=chat.user_suffix)
    _, _, chat.assistant_suffix = _between(render([user, answer]), u, a)
    chat.user_prefix = _without(answer_to_user, prefix=chat.assistant_suffix)
    chat.no_system = _without(before, suffix=chat.user_prefix)

    try:
        chat.system_prefix, chat.system_suffix, _ = _between(render([system, user]), s, u)
    except NotLiteralError:  # it is refused: the first message begins with it
        chat.system_prefix, chat.system_suffix = chat.no_system + chat.user_prefix, "\n\n"
    if chat.system_suffix.endswith(chat.user_prefix):
        chat.system_suffix = chat.system_suffix.removesuffix(chat.user_prefix)
    else:
        chat.flags |= FOLD_SYSTEM
    late = render([user, system, user2])
    if late is not None and u in late and s in late.split(u)[1]:  # not moved to the front
        _, user_to_system, late_to_user, _ = _between(late, u, s, u2)
        chat.late_system_prefix = _without(user_to_system, prefix=chat.user_suffix)
        chat.late_system_suffix = _without(late_to_user, suffix=chat.user_prefix)
        chat.flags |= LATE_SYSTEM

    plain = render([user])
    chat.generate = _without(render([user], generation_prompt=True) or "", prefix=plain)
    chat.generate_no_think = _without(render([user], generation_prompt=True, think=False) or "", prefix=plain)

    for flag, role in ((TRIM_SYSTEM, "system"), (TRIM_USER, "user"), (TRIM_ASSISTANT, "assistant")):
        conversation = [system, user, answer, user2][role != "system" :]
        index = [m["role"] for m in conversation].index(role)
        padded = f" \n{conversation[index]['content']}\t "
        conversation[index] = _message(role, padded)
        if padded not in (render(conversation) or padded):
            chat.flags |= flag

    thinking = _message("assistant", f"<think>\nSENTINEL-five\n</think>\n\n{a}")
    if "SENTINEL-five" not in (render([user, thinking]) or ""):
        chat.flags |= DROP_THOUGHTS
        if f"\n\n{a}" not in (render([user, thinking]) or ""):
            chat.flags |= STRIP_ANSWER
    elif "SENTINEL-five" not in (render([user, thinking, user2]) or ""):
        chat.flags |= THINK_BLOCKS
        _, to_thoughts, chat.think_close, _ = _between(render([user, thinking]), u, "SENTINEL-five", a)
        chat.think_open = _without(to_thoughts, prefix=chat.user_suffix + chat.assistant_prefix)
        if f"\n\n\n{a}" not in (render([user, _message("assistant", f"\n\n\n{a}")]) or ""):
            chat.flags |= STRIP_ANSWER
    return chat


def _conversations() -> list[list[Message]]:
    """Conversations to check the pieces on: 1 to 4 turns, with and without system, with awkward contents."""
    contents = itertools.cycle(
        [
            "Hello there",
            "  two spaces before, a newline behind\n",
            "",
            "\n\n\tlines\n\nwith gaps \n",
            "\x1c\u00a0\u2003wide spaces\u3000\x85",
            "{{ braces }} {% raw %} <b>&amp;'\"",
            "naïve 中文 \U0001f468\u200d\U0001f469",
            " ",
        ]
    )
    answers = itertools.cycle(
        [
            "An answer.",
            " \n padded answer \n\n",
            "<think>\nsome thoughts\n\n</think>\n\nThe answer.",
            "<think></think>short",
            "no opening tag</think>\n\n\nrest\n",
            "\n<think>\n\n a \n\n</think> b </think>\nc",
            "<think>t</think> \n\tspaces in front ",
            "<think>unfinished",
            "\n\nplain",
            "",
        ]
    )
    found = []
    for turns, system, ends_in_answer in itertools.product(range(1, 5), (False, True), (False, True)):
        for _ in range(9):
            conversation = [_message("system", next(contents))] if system else []
            for _ in range(turns):
                conversation += [_message("user", next(contents)), _message("assistant", next(answers))]
            found.append(conversation if ends_in_answer else conversation[:-1])
            next(contents)  # so that the cycles meet in other places
    return found


def _irregular_conversations() -> list[list[Message]]:
    """Conversations in which user and assistant do not take turns, or a tool speaks as the user."""
    s, u, a = _message("system", " s "), _message("user", " u "), _message("assistant", "<think>t</think>a ")
    tool = _message("user", "<tool_response>r</tool_response>")
    orders = [[s], [a], [u, u], [u, a, a], [s, a, u], [a, a], [s, s, u], [u, s], [u, s, a], [tool, a]]
    return [*orders, [u, a, tool], [u, a, tool, a]]


def chat_template(source: str, special_tokens: dict[str, str]) -> ChatTemplate:
    """The pieces of a Jinja template, checked against it. Raises NotLiteralError (or a Jinja error in `source`).

    They have to hold for all that a chat is made of, which ends in a question and has no system message. For others
    (with one, or that end in an answer) `differs` says it if they do not.

    If the pieces hold for conversations in which user and assistant take turns, but not for some others (which
    the template may also refuse), the flag TURNS_ONLY limits them to the former.
    """
    user = _message("user", "Hello")
    render = Renderer(source, special_tokens)
    dated = render([user]) is None and "strftime_now" in source
    if dated:
        render = Renderer(source, special_tokens, with_date=True)
    chat = find_pieces(render)

    def is_chat(messages: list[Message], prompt: bool) -> bool:
        return prompt and messages[0]["role"] != "system" and messages[-1]["role"] == "user"

    def first_difference(conversations: list[list[Message]], needed: bool | None = None) -> str | None:
        """The roles of a conversation that the pieces do not hold. needed: of those only that a chat is made of."""
        for messages, prompt, think in itertools.product(conversations, (False, True), (True, False)):
            if needed is not None and needed != is_chat(messages, prompt):
                continue
            try:
                composed = compose(chat, messages, prompt, think)
            except NotLiteralError:
                composed = None
            rendered = render(messages, prompt, think)
            if composed != rendered and not (composed is None and chat.flags & TURNS_ONLY):
                return ", ".join(m["role"] for m in messages)
        return None

    if first_difference(_irregular_conversations()) is not None:
        chat.flags |= TURNS_ONLY
    conversations = [*_conversations(), *_irregular_conversations()]
    if (roles := first_difference(conversations, needed=True)) is not None:
        raise NotLiteralError(f"the conversation ({roles}) is not made of the same pieces as others")
    if (roles := first_difference(conversations, needed=False)) is not None:
        chat.differs = f"the conversation ({roles}) is not as the template has it"
    if dated:
        chat.differs += "; " * bool(chat.differs) + f"the date is always {DATE:%Y-%m-%d}"
    return chat


# ----------------------------------------------------------------------------
# In a process of its own: a template is a program from elsewhere. Jinja's sandbox keeps it from Python's objects, but
# not from taking all the time and memory there is. The child reads {"source", "special_tokens", "limits"} as JSON from
# its standard input and writes the pieces as bytes, or, with exit code 1, the reason why there are none.

LIMITS = {
    "cpu_seconds": 20,  # Qwen3's template takes half a second
    "wall_seconds": 300,  # for a machine that has other things to do
    "memory": 1 << 30,  # bytes of address space
    "pieces": 1 << 20,  # bytes; Llama 3's are 400
}


def child_main() -> int:
    """The child: limits itself, then does what the section's heading says."""
    task = json.load(sys.stdin)
    limits = task["limits"]
    for limit, value in (
        (resource.RLIMIT_CPU, limits["cpu_seconds"]),
        (resource.RLIMIT_AS, limits["memory"]),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    try:
        chat = chat_template(task["source"], task["special_tokens"])
        pieces = chat.to_bytes()
        if len(pieces) > limits["pieces"]:
            raise NotLiteralError(f"the pieces are {len(pieces)} bytes, expected at most {limits['pieces']}")
    except (NotLiteralError, jinja2.TemplateError) as error:
        reason = str(error)
    except MemoryError:
        reason = f"it takes more than {limits['memory'] >> 20} MB"
    except Exception as error:  # whatever Jinja and Python make of a strange template
        reason = f"{type(error).__name__}: {error}"
    else:
        sys.stdout.buffer.write(struct.pack("<I", len(pieces)) + pieces + chat.differs.encode())
        return 0
    sys.stdout.buffer.write(reason[:1000].encode("utf-8", "backslashreplace"))
    return 1


@lru_cache(maxsize=8)
def _in_child(task: str, cpu_seconds: float, wall_seconds: float) -> tuple[bytes, str]:
    """What a child process makes of a task: (pieces, what they cannot hold) or (b"", the reason why there are none)."""
    command = [sys.executable, "-m", "export.chat_template"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    ) as child:
        try:
            output, _ = child.communicate(task.encode(), timeout=wall_seconds)
        except BaseException as error:  # also Ctrl-C: the child must not go on alone
            child.kill()
            child.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return b"", f"it takes more than {wall_seconds} s"
            raise
    if child.returncode == 0:
        end = 4 + int.from_bytes(output[:4], "little")
        return output[4:end], output[end:].decode("utf-8")
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return b"", f"it takes more than {cpu_seconds} s of processor time"
    if child.returncode == 1 and output:
        return b"", output.decode("utf-8")
    return b"", f"its process ended with code {child.returncode}"


def chat_pieces(source: str, special_tokens: dict[str, str]) -> tuple[bytes, str]:
    """The chat part of a tokenizer section, and what it cannot hold; or (b"", the reason why there is none, in a line).

    A child process does it, with limits on time and memory.
    """
    task = json.dumps({"source": source, "special_tokens": special_tokens, "limits": LIMITS})
    pieces, reason = _in_child(task, LIMITS["cpu_seconds"], LIMITS["wall_seconds"])
    return pieces, one_line(reason.replace("\n", " "))


# ----------------------------------------------------------------------------
# A Hugging Face directory


def find_source(hf_dir: Path, config: dict[str, Any]) -> str | None:
    """The template, or None. A file of its own goes before tokenizer_config.json."""
    path, config_path = hf_dir / "chat_template.jinja", hf_dir / "tokenizer_config.json"
    if path.exists():
        return read_text(path)
    source = config.get("chat_template")
    if isinstance(source, list):  # [{"name": .., "template": ..}, ..]
        if not all(isinstance(t, dict) and isinstance(t.get("name"), str) for t in source):
            raise ModelError(f"{config_path}: chat_template is {shown(source)}, expected names with templates")
        source = {t["name"]: t.get("template") for t in source}.get("default")
    if not isinstance(source, str | None):
        raise ModelError(f"{config_path}: chat_template is {shown(source)}, expected a text")
    return source


def token_text(config: dict[str, Any], field: str, path: Path) -> str | None:
    """A special token of tokenizer_config.json, the file `path`: a text, or an object with its content; None: none."""
    token = config.get(field)
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str) and token is not None:
        raise ModelError(f"{path}: {field} is {shown(token)}, expected a text or an object with content")
    return text


def chat_section(hf_dir: Path, config: dict[str, Any]) -> tuple[bytes, str]:
    """Chat part of the tokenizer section for the template in `hf_dir` or in `config`, its tokenizer_config.json.

    And a line that says what it cannot hold, or why there is none for a template; otherwise "". Without a template:
    (b"", ""). Raises ModelError for files that cannot be read.
    """
    source = find_source(hf_dir, config)
    if not source:
        return b"", ""
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: token_text(config, name, hf_dir / "tokenizer_config.json") for name in names}
    pieces, reason = chat_pieces(source, {name: text for name, text in special.items() if text})
    return pieces, reason and f"{hf_dir}: {'chat template' if pieces else 'no chat template exported'}: {reason}"


if __name__ == "__main__":
    sys.exit(child_main())
