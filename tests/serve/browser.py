"""A headless Chromium, told what to do through its pipe (the DevTools protocol)."""

import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from programs import end_with_test_run

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "google-chrome"))), None)
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--hide-scrollbars"),
)


class Page:
    """One page of a browser of its own."""

    def __init__(self, folder: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        high = [os.dup(to_read), os.dup(to_write)]

        def numbers() -> None:  # what Chromium reads is 3, what it writes is 4
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)
            end_with_test_run()

        assert PROGRAM is not None and min(high) > 4
        self._process = subprocess.Popen(
            [PROGRAM, *_FLAGS, f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"],
            preexec_fn=numbers,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for fd in (to_read, to_write, *high):
            os.close(fd)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.requests: list[str] = []
        """URLs that the page has asked for."""
        self.messages: list[str] = []
        """Complaints of the browser."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            for answer in self._received(deadline):
                if answer.get("id") == number:
                    assert "error" not in answer, answer
                    return answer["result"]  # type: ignore[no-any-return]

    def _received(self, deadline: float) -> list[dict[str, Any]]:
        ready, _, _ = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
        assert ready, "the browser does not answer"
        data = os.read(self._read, 1 << 20)
        assert data, "the browser has ended"
        *whole, self._rest = (self._rest + data).split(b"\0")
        found = [json.loads(each) for each in whole]
        for event in found:
            self._note(event.get("method"), event.get("params", {}))
        return found

    def _note(self, method: str | None, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Log.entryAdded":
            self.messages.append(params["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.messages.append(params["exceptionDetails"]["text"])

    def evaluate(self, code: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = 60) -> Any:
        """Waits until an expression is true; returns its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(condition)):
            assert time.monotonic() < deadline, f"{condition} is not so within {seconds} s"
            time.sleep(0.05)
        return value

    def open(self, url: str, width: int = 1000, height: int = 800, mobile: bool = False) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )
        self.send("Page.navigate", url=url)
        self.wait("document.readyState == 'complete' && location.protocol != 'about:'")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
