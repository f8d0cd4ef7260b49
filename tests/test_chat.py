"""A chat on a terminal: keys are typed and the screen is read, in tmux."""

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import tempfile
import termios
import time
from pathlib import Path

import pytest

from tests.helpers import ROOT

LLAMA = ROOT / "build" / "models" / "tiny-llama.q8.bin"
AWQ = ROOT / "build" / "models" / "tiny-llama.awq.bin"  # emulated: an answer that takes seconds
HELLO = "Type a message. /help lists commands, Ctrl-D ends the conversation."

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
pytestmark = needs_tmux


class Terminal:
    """A terminal of 90 columns in which a program runs; keys can be typed and the screen be read."""

    def __init__(self, folder, *command, lines=40, **environment):
        own = Path(tempfile.mkdtemp(dir=folder))
        self.socket, self.end = own / "tmux", own / "end"
        variables = {"RUNQ_HISTORY": folder / "state" / "history", "LANG": "C", "LC_ALL": "", **environment}
        words = [f"{name}={value}" for name, value in variables.items()]
        words = ["env", "-u", "NO_COLOR", *words, *map(str, command)]
        line = " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
        # The shell goes on after Ctrl-C, too: without a trap of its own dash would end with the program.
        self.tmux("-f", "/dev/null", "new-session", "-d", "-s", "chat", "-x", "90", "-y", str(lines),
                  f"trap : INT; {line}; echo code $? > '{self.end}'; sleep 100")  # fmt: skip

    def tmux(self, *words):
        done = subprocess.run(
            ["tmux", "-u", "-S", self.socket, *map(str, words)], capture_output=True, text=True, check=True, cwd=ROOT
        )
        return done.stdout

    def type(self, *keys):
        """Words as they are, keys by tmux's names: Enter, Up, C-c."""
        for key in keys:
            self.tmux("send-keys", "-t", "chat", key)

    def say(self, text):
        self.tmux("send-keys", "-t", "chat", "-l", text)
        self.type("Enter")

    def paste(self, text):
        """As a terminal does it that was asked for bracketed paste (-p)."""
        self.tmux("set-buffer", text)
        self.tmux("paste-buffer", "-p", "-t", "chat")

    def screen(self, *options):
        """What there is to see, and what has gone up; empty lines and blanks at the end of a line left out."""
        text = self.tmux("capture-pane", "-p", "-J", "-S", "-", *options, "-t", "chat")
        return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())

    def wait_for(self, pattern, seconds=120):
        """The screen once it has a pattern."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            screen = self.screen()
            if re.search(pattern, screen, re.M):
                return screen
            time.sleep(0.05)
        raise AssertionError(f"no {pattern!r} in:\n{self.screen()}")

    def code(self):
        """The exit code, which is waited for."""
        deadline = time.monotonic() + 120
        while not self.end.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert self.end.exists(), f"the program goes on:\n{self.screen()}"
        return int(self.end.read_text().split()[1])

    def close(self):
        subprocess.run(["tmux", "-S", self.socket, "kill-server"], capture_output=True, check=False)


@pytest.fixture
def open_chat(tmp_path):
    """Starts a chat in a terminal: its words and variables."""
    terminals = []

    def start(*args, program="runq", model=LLAMA, **environment):
        terminals.append(Terminal(tmp_path, ROOT / program, model, "-m", "chat", "-t", 0, *args, **environment))
        terminals[-1].wait_for("> *$")
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


def saved(terminal, path):
    """The messages of the conversation."""
    terminal.say(f"/save {path}")
    terminal.wait_for(rf"messages are in {re.escape(str(path))}$")
    return [(message["role"], message["content"]) for message in json.loads(path.read_text())]


def test_words_answers_and_the_end(open_chat):
    chat = open_chat("-n", 12)
    assert chat.screen().startswith(HELLO)
    chat.say("Hello")
    chat.wait_for(r"^> Hello\n.+\n> *$")
    chat.type("Enter")  # an empty line is no message
    chat.type("C-d")
    assert chat.code() == 0
    assert re.search(r"^>\n> \^D\nmodel +llama", chat.screen(), re.M)


def test_the_line_is_edited_with_the_usual_keys(open_chat, tmp_path):
    chat = open_chat("-n", 4)
    chat.tmux("send-keys", "-t", "chat", "-l", "Hxllo wörld")
    chat.type("Home", "Right", "Delete", "e", "End", "Left", "BSpace", "L", "C-e", "!", "Enter")
    chat.wait_for(r"^> Hello wörLd!\n.+\n> *$")
    chat.say("second")
    chat.wait_for(r"^> second\n.+\n> *$")
    chat.type("Up", "Up", "C-a", "C-k", "third", "Enter")
    chat.wait_for(r"^> third\n.+\n> *$")
    users = [text for role, text in saved(chat, tmp_path / "a.json") if role == "user"]
    assert users == ["Hello wörLd!", "second", "third"]


def test_history_is_kept_and_nobody_else_reads_it(open_chat, tmp_path):
    chat = open_chat("-n", 4)
    chat.say("a message of the first run")
    chat.wait_for(r"first run\n.+\n> *$")
    chat.say("/bye")
    assert chat.code() == 0
    history = tmp_path / "state" / "history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.parent.stat().st_mode & 0o777 == 0o700
    chat.close()
    chat = open_chat("-n", 4)
    chat.type("Up", "Up")
    chat.wait_for(r"^> a message of the first run$")
    chat.type("C-c")
    chat.close()
    before = history.read_bytes()
    chat = open_chat("-n", 4, RUNQ_HISTORY="")
    chat.type("Up")
    chat.say("not kept")
    chat.wait_for(r"^> not kept\n.+\n> *$")
    assert history.read_bytes() == before


def test_ctrl_c_ends_an_answer_and_not_the_program(open_chat, tmp_path):
    chat = open_chat("-n", 400, program="runq_awq", model=AWQ)
    chat.say("Tell me a story.")
    chat.wait_for(r"^> Tell me a story\.\n\S")
    chat.type("C-c")
    chat.wait_for(r"story\.\n.+\n> *$")
    messages = saved(chat, tmp_path / "a.json")
    assert [role for role, _ in messages] == ["user", "assistant"]
    # At the marker it takes back what has been typed, and says how to leave.
    chat.tmux("send-keys", "-t", "chat", "-l", "not said")
    chat.wait_for("^> not said$")
    chat.type("C-c")
    chat.wait_for(r"^> not said\nCtrl-D or /bye ends the conversation\.\n> *$")
    chat.say("/bye")
    assert chat.code() == 0
    assert len(messages[1][1]) < 1000


def test_commands(open_chat, tmp_path):
    chat = open_chat("-n", 6, "-y", "You are short.", HOME=tmp_path)
    chat.say("/help")
    screen = chat.wait_for("Ctrl-C ends an answer")
    for name in ("/system", "/reset", "/stats", "/save", "/bye", '"""'):
        assert name in screen
    chat.say("/what")
    chat.wait_for("^/what: no such command; /help lists them$")
    chat.say("/stats")
    chat.say("Hello")
    chat.wait_for(r"^read \d+ tokens, [\d.]+ tokens/s; wrote 6, [\d.]+ tokens/s; \d+ of 512 positions used$")
    messages = saved(chat, tmp_path / "first.json")
    assert messages[0] == ("system", "You are short.")
    assert [role for role, _ in messages[1:]] == ["user", "assistant"]
    chat.say("/reset")
    chat.wait_for("^a new conversation$")
    assert saved(chat, tmp_path / "reset.json") == [("system", "You are short.")]
    chat.say('/system   Say "yes". ')
    chat.wait_for("with this system prompt")
    assert saved(chat, tmp_path / "system.json") == [("system", 'Say "yes".')]
    chat.say("/system")
    chat.wait_for("without a system prompt")
    assert saved(chat, tmp_path / "none.json") == []
    chat.say("/save ~/at home.json")
    chat.wait_for(f"^0 messages are in {re.escape(str(tmp_path))}/at home.json$")
    assert json.loads((tmp_path / "at home.json").read_text()) == []
    chat.say("/save ~")
    chat.wait_for(f"^/save: {re.escape(str(tmp_path))}: cannot write: Is a directory$")
    chat.say("/save")
    chat.wait_for("^/save: no file given$")
    chat.say(f"/save {tmp_path}/no/such.json")
    chat.wait_for("no/such.json: cannot write: No such file or directory")


def test_several_lines_between_quotes(open_chat, tmp_path):
    chat = open_chat("-n", 4)
    for line in ('"""first', "", "third\\"):
        chat.say(line)
    chat.say('end"""')
    chat.wait_for(r'^\. end"""\n.+\n> *$')
    assert saved(chat, tmp_path / "a.json")[0] == ("user", "first\n\nthird\\\nend")
    chat.say('"""one"""')
    chat.wait_for(r'"""one"""\n.+\n> *$')
    assert saved(chat, tmp_path / "b.json")[2] == ("user", "one")
    chat.say('"""two')
    chat.say("lines")
    chat.type("C-d")
    chat.wait_for(r"^\. lines\n\. \^D\n.+\n> *$")
    assert saved(chat, tmp_path / "c.json")[4] == ("user", "two\nlines")
    chat.say('"""')
    chat.type("C-d")
    chat.wait_for(r'^> """\n\. \^D\n> *$')  # nothing was said
    assert len(saved(chat, tmp_path / "d.json")) == 6


class Pty:
    """A terminal without a screen: the test sees every byte that is written to it, and its settings."""

    def __init__(self, *command, **environment):
        self.pid, self.keyboard = pty.fork()
        if self.pid == 0:
            for number in (signal.SIGINT, signal.SIGTSTP):  # who started this may ignore them
                signal.signal(number, signal.SIG_DFL)
            os.execvpe(str(command[0]), list(map(str, command)), {**os.environ, "TERM": "xterm", **environment})

    def type(self, keys):
        os.write(self.keyboard, keys)

    def echoes(self):
        return bool(termios.tcgetattr(self.keyboard)[3] & termios.ECHO)

    def read_until(self, pattern):
        """What is written up to a pattern."""
        text = b""
        while not re.search(pattern, text):
            # The last resort, where the program hangs.
            assert select.select([self.keyboard], [], [], 300)[0], text
            text += os.read(self.keyboard, 1)
        return text

    def wait_for_sleep(self):
        """Until the program that has the terminal waits for a key."""
        stat = Path(f"/proc/{os.tcgetpgrp(self.keyboard)}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "S":
            pass

    def close(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.keyboard)


MARKER = rb">\x1b\[0m $"  # bold up to here
ANSWER = rb"\x1b\[\?2004l\w"  # has begun behind the end of a line, at which pastes are asked for no more


@pytest.fixture
def open_pty(tmp_path):
    """Starts a command on a terminal without a screen."""
    terminals = []

    def start(*command):
        terminals.append(Pty(*command, RUNQ_HISTORY=str(tmp_path / "history")))
        return terminals[-1]

    yield start
    for terminal in terminals:
        terminal.close()


def test_what_is_typed_during_an_answer_is_the_next_line(open_pty):
    """The terminal is as it was, and so shows it by itself."""
    chat = open_pty(ROOT / "runq_awq", AWQ, "-m", "chat", "-t", 0, "-n", 12)
    chat.read_until(MARKER)
    assert not chat.echoes()
    while True:
        chat.type(b"Hello\r")
        chat.read_until(ANSWER)
        os.kill(chat.pid, signal.SIGSTOP)
        os.waitpid(chat.pid, os.WUNTRACED)
        if chat.echoes():
            break
        os.kill(chat.pid, signal.SIGCONT)  # the answer had its end: this machine is busy
        chat.read_until(MARKER)
    chat.type(b"/st")
    chat.read_until(b"/st$")
    os.kill(chat.pid, signal.SIGCONT)
    chat.read_until(MARKER)
    chat.read_until(b"/st$")
    assert not chat.echoes()
    chat.type(b"ats\r")
    chat.read_until(b"speed is shown after each answer")
    chat.read_until(MARKER)
    chat.type(b"/stats\r/bye\r")  # two lines at once: the second one is not lost between them
    chat.read_until(b"speed is shown no more")
    chat.read_until(rb"/bye\r\n")
    chat.read_until(b"tokens/s")


def test_the_terminal_is_the_shells_while_a_chat_is_stopped_and_behind_its_end(open_pty):
    """Ctrl-Z during an answer, and twice in a line; the next program finds the terminal as it was."""
    chat = [ROOT / "runq_awq", AWQ, "-m", "chat", "-t", "0", "-n", "12", "-j", "1"]
    stopped = "stty -g; echo stopped; read typed; fg; "
    line = f'stty -g; set -m; "$@"; {stopped * 3} stty -g; echo ended'
    terminal = open_pty("sh", "-c", line, "sh", *chat)
    at_first = terminal.read_until(rb"\n$")
    terminal.read_until(MARKER)
    terminal.type(b"Hello\r")
    terminal.read_until(ANSWER)
    terminal.type(b"\x1a")
    for typed in (b"wo", b"rd"):
        assert terminal.read_until(rb"stopped\r\n$").endswith(at_first + b"stopped\r\n")
        terminal.type(b"\r")  # and the answer goes on, or the line
        terminal.read_until(rb"@.*\n")  # the command, which the shell repeats
        terminal.read_until(MARKER)
        assert not terminal.echoes()
        terminal.type(typed)
        terminal.read_until(typed)
        terminal.wait_for_sleep()  # libedit does not draw the line again if Ctrl-Z comes just before
        terminal.type(b"\x1a")
    assert terminal.read_until(rb"stopped\r\n$").endswith(at_first + b"stopped\r\n")
    terminal.type(b"\r")
    terminal.read_until(MARKER[:-1] + b"word$")
    terminal.type(b"\x15\x04")  # nothing besides: once it is deleted, Ctrl-D is the end
    end = terminal.read_until(rb"ended\r\n$")
    assert end.endswith(at_first + b"ended\r\n")
    assert end.rfind(b"\x1b[?2004l") > end.rfind(b"\x1b[?2004h")


def test_a_paste_stays_one_message(open_chat, tmp_path):
    chat = open_chat("-n", 4)
    text = "for i in range(3):\n\tprint('é', i)\n\nÜber: /bye"
    chat.paste(text + "\n")
    chat.type("Enter")
    chat.wait_for(r"/bye\n.+\n> *$")
    assert saved(chat, tmp_path / "a.json")[0] == ("user", text)


def test_a_paste_that_is_too_long(open_chat, tmp_path):
    """One line, and nothing of it is said; what is typed next is a message."""
    chat = open_chat("-n", 3)
    (tmp_path / "text").write_text("x" * 70_000)
    chat.tmux("load-buffer", tmp_path / "text")
    chat.tmux("paste-buffer", "-p", "-t", "chat")
    chat.type("Enter")
    chat.wait_for(r"^this message is too long: \d+ tokens, the context is 512 \(--ctx\)\n> *$")
    chat.say("Hello")
    chat.wait_for(r"^> Hello\n.+\n> *$")
    assert [words for role, words in saved(chat, tmp_path / "a.json") if role == "user"] == ["Hello"]


def test_a_paste_of_more_than_a_line_of_the_terminal_has(open_chat, tmp_path):
    """A terminal's own line ends after 4,096 bytes. The history has all of it."""
    chat = open_chat("-n", 4)
    text = "\n".join(f"line {i}: " + "wörd " * 10 + "." for i in range(170))
    assert len(text.encode()) > 10_000
    chat.paste(text)
    chat.type("Enter")
    screen = chat.wait_for(r"^this message is too long: \d+ tokens, the context is 512 \(--ctx\)\n> *$")
    n_tokens = int(re.search(r"too long: (\d+) tokens", screen)[1])
    command = [ROOT / "runq", LLAMA, "-m", "chat", "-i", text]
    refused = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert f"the prompt is {n_tokens} tokens long" in refused.stderr


def test_the_oldest_turns_go_when_the_context_is_full(open_chat, tmp_path):
    chat = open_chat("-c", 96, "-n", 30, "-y", "You are short.")
    for i in range(4):
        chat.say(f"Tell me story {i}.")
        chat.wait_for(rf"story {i}\.\n(the context.*\n)?.+(\n.*)?\n> *$")
    assert re.search(
        r"^the context of 96 tokens is full: the oldest (turn is|\d turns are) forgotten$", chat.screen(), re.M
    )
    messages = saved(chat, tmp_path / "a.json")
    assert messages[0] == ("system", "You are short.")
    assert messages[-2] == ("user", "Tell me story 3.")
    assert ("user", "Tell me story 0.") not in messages


def test_colour_only_where_it_is_wanted(open_chat):
    chat = open_chat()
    chat.say("Hello")
    chat.wait_for(r"^> Hello\n.+\n> *$")
    assert re.search(r"^\x1b\[1m>\x1b\[0m\S* Hello\n\w", chat.screen("-e"), re.M)
    for variables in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        chat = open_chat(**variables)
        assert "\x1b" not in chat.screen("-e")
        chat.say("Hello")
        chat.wait_for(r"^> Hello\n.+\n> *$")


def test_the_window_can_change_its_size(open_chat, tmp_path):
    """What is in the line stays, wherever the terminal draws it."""
    chat = open_chat("-n", 4)
    chat.tmux("send-keys", "-t", "chat", "-l", "word " * 20 + "end")
    chat.wait_for("end$")
    for columns in (60, 80, 40):
        chat.tmux("resize-window", "-t", "chat", "-x", columns, "-y", "20")
    chat.type("BSpace", "D", "Enter")
    chat.wait_for(r"^> *$")
    assert saved(chat, tmp_path / "a.json")[0] == ("user", "word " * 20 + "enD")
