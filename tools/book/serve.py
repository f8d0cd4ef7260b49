"""Serves a folder on this machine alone: python tools/book/serve.py FOLDER [PORT]

The two headers of cross-origin isolation let the page in run/ share memory between threads. The third has the browser
refuse whatever would be loaded from another host.
"""

import contextlib
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HOST = "127.0.0.1"
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Content-Security-Policy": "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:",
    "Cache-Control": "no-cache",  # a page built anew is seen at once
}


class Handler(SimpleHTTPRequestHandler):
    """Files of one folder."""

    # What the page in run/ needs, whatever the machine's own table says.
    extensions_map = SimpleHTTPRequestHandler.extensions_map | {
        ".wasm": "application/wasm",
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".svg": "image/svg+xml",
    }

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing of each request."""


def serve(folder: Path, port: int) -> ThreadingHTTPServer:
    """A server that only has to run; port 0 takes any that is free. Raises OSError, ValueError."""
    if not (folder / "index.html").is_file():
        raise ValueError(f"{folder}: no index.html (make book makes build/book)")
    return ThreadingHTTPServer((HOST, port), partial(Handler, directory=str(folder)))


def main() -> int:
    """Serves until Ctrl-C."""
    arguments = sys.argv[1:]
    if not 1 <= len(arguments) <= 2:
        print(__doc__)
        return 2
    port = arguments[1] if len(arguments) == 2 else "8000"
    if not port.isdecimal() or int(port) > 65535:
        print(f"serve.py: PORT={port}: expected a number from 0 to 65535", file=sys.stderr)
        return 1
    try:
        server = serve(Path(arguments[0]), int(port))
    except (OSError, ValueError) as error:
        print(
            f"serve.py: PORT={port}: {error.strerror}" if isinstance(error, OSError) else f"serve.py: {error}",
            file=sys.stderr,
        )
        return 1
    print(f"http://{HOST}:{server.server_port}/ (Ctrl-C ends it)", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
