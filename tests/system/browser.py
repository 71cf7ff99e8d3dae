"""A headless Chromium, driven over its debugging pipe: no driver and no package besides the browser itself."""
import base64
import json
import os
import shutil
import subprocess
import tempfile
import time

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)


class Browser:
    def __init__(self):
        self.profile = tempfile.TemporaryDirectory()
        its_end, self.out = os.pipe()
        self.incoming, its_out = os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to 4.
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{its_end} 4>&{its_out}', "bash", CHROMIUM, "--headless=new", "--remote-debugging-pipe", "--no-sandbox",
             "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions", "--disable-background-networking",
             f"--user-data-dir={self.profile.name}", "--lang=en-US", "about:blank"],
            pass_fds=(its_end, its_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(its_end)
        os.close(its_out)
        self.rest, self.number, self.events = b"", 0, []

    def read(self):
        while b"\0" not in self.rest:
            got = os.read(self.incoming, 1 << 16)
            assert got, "the browser ended"
            self.rest += got
        line, self.rest = self.rest.split(b"\0", 1)
        return json.loads(line)

    def call(self, method, session=None, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def close(self):
        os.close(self.out)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.incoming)
        self.profile.cleanup()


class Page:
    """A tab with storage of its own."""

    def __init__(self, browser, url, width=1200, height=800):
        self.browser = browser
        self.context = browser.call("Target.createBrowserContext")["browserContextId"]
        self.target = browser.call("Target.createTarget", url="about:blank", browserContextId=self.context)["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(domain + ".enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.goto(url)

    def call(self, method, **params):
        return self.browser.call(method, self.session, **params)

    def goto(self, url):
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def js(self, expression):
        done = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not self.js(f"!!({condition})"):
            assert time.monotonic() < end, f"never came true: {condition}\n{self.js('document.body.innerText')}"
            time.sleep(0.05)

    def type(self, selector, text):
        self.js(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)

    def press(self, key, code, shift=False):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, modifiers=8 if shift else 0,
                      **({"text": "\r"} if kind == "keyDown" else {}))

    def click(self, selector):
        """With the mouse, where a person would."""
        x, y = self.js(f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect(); "
                       "return [r.x + r.width / 2, r.y + r.height / 2]; })()")
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def picture(self, path):
        with open(path, "wb") as f:
            f.write(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def own_events(self, method):
        self.js("0")     # what was sent before this answer has been read
        return [e["params"] for e in self.browser.events if e.get("sessionId") == self.session and e["method"] == method]

    def complaints(self):
        """What the console would show in red: exceptions, refused resources, breaches of the policy."""
        return ([e["exceptionDetails"] for e in self.own_events("Runtime.exceptionThrown")] +
                [e["entry"]["text"] for e in self.own_events("Log.entryAdded") if e["entry"]["level"] == "error"])

    def requested(self):
        return [e["request"]["url"] for e in self.own_events("Network.requestWillBeSent")]

    def close(self):
        self.browser.call("Target.disposeBrowserContext", browserContextId=self.context)
