"""A headless Firefox, over WebDriver BiDi, which it speaks itself: https://w3c.github.io/webdriver-bidi/"""

import json
import re
import subprocess
import time

from websocket import create_connection


class Firefox:
    """One page of a Firefox with a profile of its own in `folder`. `errors`: what its console said."""

    def __init__(self, binary, folder, url, width):
        command = [binary, "--headless", "--no-remote", "--profile", str(folder), "--remote-debugging-port", "0"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.errors, self._sent = [], 0
        line = next((line for line in self._process.stderr if "WebDriver BiDi listening on" in line), None)
        if line is None:
            raise RuntimeError(f"{binary} does not start")
        address = re.search(r"ws://\S+", line)[0]
        self._socket = create_connection(f"{address}/session", timeout=300, suppress_origin=True)
        self.send("session.new", capabilities={})
        self.send("session.subscribe", events=["log.entryAdded"])
        self._context = self.send("browsingContext.getTree")["contexts"][0]["context"]
        viewport = {"width": width, "height": 900}
        self.send("browsingContext.setViewport", context=self._context, viewport=viewport)
        self.send("browsingContext.navigate", context=self._context, url=url, wait="complete")

    def send(self, method, **params):
        """A command's result."""
        self._sent += 1
        self._socket.send(json.dumps({"id": self._sent, "method": method, "params": params}))
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("method") == "log.entryAdded" and answer["params"]["level"] in ("error", "warn"):
                self.errors.append(answer["params"]["text"])
            if answer.get("id") == self._sent:
                if answer["type"] == "error":
                    raise RuntimeError(f"{method}: {answer['message']}")
                return answer["result"]

    def evaluate(self, expression):
        """What an expression gives, through JSON; of a promise, what it comes to."""
        text = f"Promise.resolve({expression}).then((value) => JSON.stringify(value ?? null))"
        target = {"context": self._context}
        answer = self.send("script.evaluate", expression=text, target=target, awaitPromise=True)
        if answer["type"] != "success":
            raise RuntimeError(answer["exceptionDetails"]["text"])
        return json.loads(answer["result"]["value"])

    def wait_for(self, expression, seconds=300):
        """Until an expression is true. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise TimeoutError(expression)
            time.sleep(0.1)

    def close(self):
        self.send("browser.close")
        self._socket.close()
        self._process.wait(30)
