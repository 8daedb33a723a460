"""Rank 0's side of the control plane, and the notes that it and the ranks send each other.

Notes are lines of JSON. Ranks in notes are those of the communicator that ``init`` made; ``group`` is the name of that
one ("") or of a split.

    to the hub    {rank, token} first, then bye {calls}, closed {group}, wait {group, call, what}, fail {group, reason},
                  message {group, to, message}
    from the hub  lost {rank, how}, left {rank, calls, gone}, waiting {group, call, ranks}, mismatch {group, whats},
                  fail, message {group, message, by}
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from collectives.fork import close_in_child

Note = dict[str, Any]


class Lines:
    """A socket that carries notes."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = b""
        self._lock = threading.Lock()

    def send(self, **note: Any) -> None:
        """Best effort: a peer that is gone is noticed by reading."""
        with self._lock, contextlib.suppress(OSError):
            self.sock.sendall(json.dumps(note).encode() + b"\n")

    def receive(self) -> Iterator[Note]:
        """The notes that have come. Raises ``ConnectionError`` at the end of the stream."""
        data = self.sock.recv(65536)
        if not data:
            raise ConnectionResetError("end of file")
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


class Hub:
    """Rank 0's side: a thread that hears everybody and tells everybody."""

    def __init__(self, size: int, address: str, token: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=size)
        self.port: int = self._listener.getsockname()[1]
        self._size = size
        self._token = token
        self._peers: dict[int, Lines] = {}
        self._left: dict[int, Mapping[str, int]] = {}
        self._lost: dict[int, str] = {}
        self._calls: dict[str, dict[int, tuple[int, str]]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        threading.Thread(target=self._run, name="collectives hub", daemon=True).start()

    def _run(self) -> None:
        expected = self._size
        with self._listener, self._selector:
            while expected or self._peers:
                for key, _ in self._selector.select():
                    if key.data is not None:
                        expected -= self._hear(key.fileobj, key.data)
                        continue
                    connection, _ = self._listener.accept()
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    close_in_child(connection)
                    self._selector.register(connection, selectors.EVENT_READ, [Lines(connection), -1])

    def _hear(self, connection: Any, peer: list[Any]) -> int:
        """Act on what a peer says. Returns 1 if it is new."""
        lines, rank = peer
        new = 0
        try:
            for note in lines.receive():
                if rank < 0:
                    if note.get("token") != self._token:
                        raise ConnectionRefusedError("a stranger")
                    rank = peer[1] = note["rank"]
                    self._peers[rank] = lines
                    for lost, how in self._lost.items():  # some may have come and gone already
                        lines.send(note="lost", rank=lost, how=how)
                    for left, calls in self._left.items():
                        lines.send(note="left", rank=left, calls=calls, gone=True)
                    new = 1
                else:
                    getattr(self, f"_on_{note.pop('note')}")(rank, **note)
        except (OSError, ValueError) as error:
            self._selector.unregister(connection)
            connection.close()
            self._peers.pop(rank, None)
            if rank >= 0 and rank not in self._left:
                self._lost[rank] = str(error)
                self._tell(note="lost", rank=rank, how=str(error))
        return new

    def _tell(self, **note: Any) -> None:
        """Everybody; rank 0, which shares this process, last: at the news it may end the process, and this thread."""
        for _, lines in sorted(self._peers.items(), reverse=True):
            lines.send(**note)

    def _on_bye(self, rank: int, /, calls: Mapping[str, int]) -> None:
        self._left[rank] = calls
        self._tell(note="left", rank=rank, calls=calls, gone=True)

    def _on_closed(self, rank: int, /, group: str, calls: int) -> None:
        self._tell(note="left", rank=rank, calls={group: calls}, gone=False)

    def _on_fail(self, by: int, /, **note: Any) -> None:
        self._tell(note="fail", by=by, **note)

    def _on_message(self, by: int, /, to: int, **note: Any) -> None:
        if to in self._peers:
            self._peers[to].send(note="message", by=by, **note)

    def _on_wait(self, rank: int, /, group: str, call: int, what: str) -> None:
        table = self._calls.setdefault(group, {})
        table[rank] = (call, what)
        same = {peer: text for peer, (number, text) in sorted(table.items()) if number == call}
        if len(set(same.values())) > 1:
            self._tell(note="mismatch", group=group, call=call, whats={str(peer): text for peer, text in same.items()})
        else:
            seen = {str(peer): number for peer, (number, _) in table.items()}
            for peer in same:
                if peer in self._peers:
                    self._peers[peer].send(note="waiting", group=group, call=call, ranks=sorted(same), seen=seen)
