"""A client that trusts nothing: HTTP/1.1 over asyncio's sockets, counting what comes and when. Standard library only."""
import asyncio
import dataclasses
import json
import socket
import struct
import time


class Broken(Exception):
    """The server's bytes are no answer."""


@dataclasses.dataclass
class Answer:
    status: int = 0
    headers: dict = dataclasses.field(default_factory=dict)
    body: bytes = b""
    events: list = dataclasses.field(default_factory=list)     # (seconds since the request was sent, the event's text), of a stream
    whole: bool = False                                        # its end was seen
    first: float = 0.0                                         # seconds to the head, or in a stream to the first event
    seconds: float = 0.0

    def json(self):
        return json.loads(self.body)


class Leave(Exception):
    """What on_event raises to leave in the middle of an answer."""


class Client:
    """Keeps connections open as browsers and SDKs do. pace(n) is awaited before each read, for readers that are slow."""

    def __init__(self, host, port):
        self.host, self.port = host, port
        self.idle = []

    async def connect(self, receive_buffer=None):
        s = socket.socket()
        s.setblocking(False)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_buffer:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(s, (self.host, self.port))
            return await asyncio.open_connection(sock=s, limit=receive_buffer or 1 << 16)
        except BaseException:
            s.close()
            raise

    @staticmethod
    def drop(connection, reset=False):
        """Closes; reset: at once and rudely, as a process that is killed with data unread."""
        writer = connection[1]
        s = writer.get_extra_info("socket")
        if reset and s is not None:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    def close(self):
        while self.idle:
            self.drop(self.idle.pop())

    async def request(self, method, path, body=None, headers=(), close=False, on_event=None, leave_after=None, reset=False, receive_buffer=None, pace=None):
        """The answer. close: on a connection of its own. leave_after: seconds, then the client is gone and the answer is not whole; the same
        when on_event(text) raises Leave."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        own = close or receive_buffer is not None or leave_after is not None
        lines = [f"{method} {path} HTTP/1.1", "Host: soak", *(f"{k}: {v}" for k, v in headers)]
        if own:
            lines.append("Connection: close")
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        data = "\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b"")
        answer = Answer()
        for attempt in range(2):
            reused = not own and attempt == 0 and bool(self.idle)
            connection = self.idle.pop() if reused else await self.connect(receive_buffer)
            keep = False
            begin = time.perf_counter()
            try:
                work = self._exchange(connection, method, data, answer, begin, on_event, pace)
                try:
                    await (asyncio.wait_for(work, leave_after) if leave_after is not None else work)
                    keep = answer.headers.get("connection") == "keep-alive" and not own
                    if not keep and await connection[0].read(1):
                        raise Broken("bytes behind the end of the answer")
                except (Leave, asyncio.TimeoutError):
                    if leave_after is None and on_event is None:
                        raise
                answer.seconds = time.perf_counter() - begin
                return answer
            except (ConnectionError, asyncio.IncompleteReadError) as e:
                # An idle connection may be closed while a request is on its way; only then nothing of an answer is there.
                if reused and not answer.status:
                    continue
                raise Broken(f"the connection ended in the middle: {e!r}") from e
            finally:
                if keep:
                    self.idle.append(connection)
                else:
                    self.drop(connection, reset)

    async def _exchange(self, connection, method, data, answer, begin, on_event, pace):
        reader, writer = connection
        writer.write(data)
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            answer.status = int(head[0].split(" ")[1])
            if answer.status >= 200:
                break
        answer.headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        answer.first = time.perf_counter() - begin
        if method == "HEAD" or answer.status == 204:
            answer.whole = True
        elif answer.headers.get("transfer-encoding") == "chunked":
            await self._stream(reader, answer, begin, on_event, pace)
        elif "content-length" in answer.headers:
            answer.body = await reader.readexactly(int(answer.headers["content-length"]))
            answer.whole = True
        else:
            raise Broken("an answer without a length")

    @staticmethod
    async def _stream(reader, answer, begin, on_event, pace):
        pending, parts = b"", []
        while True:
            if pace:
                await pace(len(answer.events))
            size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            piece = (await reader.readexactly(size + 2))[:-2]
            if size == 0:
                break
            parts.append(piece)
            pending += piece
            while b"\n\n" in pending:
                text, pending = pending.split(b"\n\n", 1)
                if text.startswith(b":"):
                    continue
                if not answer.events:
                    answer.first = time.perf_counter() - begin
                answer.events.append((time.perf_counter() - begin, text.decode()))
                if on_event:
                    on_event(len(answer.events))
        if pending:
            raise Broken("a stream that ends in the middle of an event")
        answer.body = b"".join(parts)
        answer.whole = True


def data_of(event):
    """(name, JSON or None for [DONE]) of an event's text."""
    name, data = "", []
    for line in event.split("\n"):
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            data.append(line[6:])
        else:
            raise Broken(f"a line that is no part of an event: {line[:100]!r}")
    text = "\n".join(data)
    return name, None if text == "[DONE]" else json.loads(text)
