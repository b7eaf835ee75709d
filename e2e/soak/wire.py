"""An HTTP/1.1 client on a bare socket: it can also do what a library keeps its user from doing."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

_CLOSED = (ConnectionError, asyncio.IncompleteReadError)


class BrokenAnswer(Exception):
    """The server closed the connection inside an answer, or sent what is no HTTP or no event."""


class Connection:
    """One connection, for one request. All methods raise `BrokenAnswer` or `OSError`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.status = 0
        self.headers: dict[str, str] = {}

    @classmethod
    async def open(cls, host: str, port: int, receive_buffer: int | None = None) -> "Connection":
        """`receive_buffer`: bytes that the kernel takes in for a client that does not read."""
        if receive_buffer is None:
            return cls(*await asyncio.open_connection(host, port))
        peer = socket.socket()
        peer.setblocking(False)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        await asyncio.get_running_loop().sock_connect(peer, (host, port))
        return cls(*await asyncio.open_connection(sock=peer, limit=receive_buffer))

    def get(self, path: str) -> None:
        self._writer.write(f"GET {path} HTTP/1.1\r\nHost: soak\r\n\r\n".encode())

    def post(self, path: str, content: bytes, length: int | str | None = None) -> None:
        """Sends a body; `length`: the length to declare, or "chunked" to declare none and send the body as chunks."""
        declared = "Transfer-Encoding: chunked" if length == "chunked" else f"Content-Length: {length or len(content)}"
        self._writer.write(f"POST {path} HTTP/1.1\r\nHost: soak\r\n{declared}\r\n\r\n".encode() + content)

    def raw(self, content: bytes) -> None:
        self._writer.write(content)

    async def head(self) -> int:
        """Waits for the status and the headers."""
        try:
            text = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = text.rstrip().split("\r\n")
            self.status = int(first.split()[1])
        except _CLOSED as error:
            raise BrokenAnswer(f"no answer: {type(error).__name__}") from None
        except (IndexError, ValueError):
            raise BrokenAnswer(f"an answer that is no HTTP: {text[:80]!r}") from None
        self.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return self.status

    async def body(self) -> bytes:
        try:
            if self.headers.get("transfer-encoding") == "chunked":
                return b"".join([part async for part in self._chunks()])
            return await self._reader.readexactly(int(self.headers.get("content-length", "0")))
        except _CLOSED as error:
            raise BrokenAnswer(f"an answer cut short: {type(error).__name__}") from None

    async def json(self) -> Any:
        body = await self.body()
        try:
            return json.loads(body)
        except ValueError:
            raise BrokenAnswer(f"an answer that is no JSON: {body[:80]!r}") from None

    async def events(self) -> AsyncIterator[Mapping[str, Any] | str]:
        """Server-sent events, as they come; "[DONE]" is one."""
        text = b""
        try:
            async for part in self._chunks():
                text += part
                *whole, text = text.split(b"\n\n")
                for event in whole:
                    data = event.removeprefix(b"data: ").decode()
                    yield data if data == "[DONE]" else json.loads(data)
        except _CLOSED as error:
            raise BrokenAnswer(f"a stream cut short: {type(error).__name__}") from None
        except ValueError:
            raise BrokenAnswer("an event that is no JSON") from None
        if text:
            raise BrokenAnswer(f"a stream that ends inside an event: {text[:80]!r}")

    def close(self, reset: bool = False) -> None:
        """Leaves, whatever is still under way."""
        if reset:
            self._writer.transport.abort()
        else:
            self._writer.close()

    async def _chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self._reader.readuntil(b"\r\n"), 16):
            yield await self._reader.readexactly(size)
            await self._reader.readexactly(2)
        await self._reader.readexactly(2)
