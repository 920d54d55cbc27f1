"""Where responses stay once they are made, so that they can be read again and continued."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import msgspec

_RECORD_OVERHEAD, _ITEM_OVERHEAD, _EVENT_OVERHEAD = 512, 192, 64
"""Bytes of Python's own objects for a record, an item of the index, an event: 205, 133 and 41 on average (tracemalloc,
2,000 records), and dictionaries that have just grown."""


class Record(msgspec.Struct, frozen=True):
    """One stored response.

    response: its JSON.  input: JSON of the items that came with the request, those of earlier turns not among them.
    item_ids: of the input's and the output's items.  previous: id of the response that it continues.
    events: those of its stream, encoded, by sequence number; kept for responses made in the background.
    first_event: sequence number of events[0].
    """

    id: str
    response: bytes
    input: bytes
    item_ids: tuple[str, ...]
    previous: str | None = None
    events: tuple[bytes, ...] = ()
    first_event: int = 0

    def size(self) -> int:
        """About how many bytes it takes."""
        texts = len(self.response) + len(self.input) + sum(map(len, self.events)) + sum(map(len, self.item_ids))
        overhead = _RECORD_OVERHEAD + _ITEM_OVERHEAD * len(self.item_ids) + _EVENT_OVERHEAD * len(self.events)
        return texts + overhead


class ResponseStore(Protocol):
    """What the endpoints need of a store. `client` is whose API key asks: nobody sees what is another's."""

    async def put(self, client: str, record: Record, history: Sequence[Record] = ()) -> None:
        """Keep a new response. history: what `history` said of the one that it continues, which may be gone by now."""

    async def get(self, client: str, response_id: str) -> Record | None:
        """The response of this id."""

    async def history(self, client: str, response_id: str) -> list[Record] | None:
        """The response of this id after all those that it continues, oldest first. They stay as long as it does,
        deleted or not."""

    async def find_item(self, client: str, item_id: str) -> Record | None:
        """A response that has the item of this id in its input or output."""

    async def delete(self, client: str, response_id: str) -> bool:
        """Forget a response. False: there was none."""

    async def usage(self) -> tuple[int, int]:
        """How many responses there are, of all clients, and how many bytes they take."""


class _Node:
    """A record that is kept, and for how many reasons: that it may be asked for, and each that continues it."""

    def __init__(self, record: Record, parent: _Node | None) -> None:
        self.record, self.parent, self.size = record, parent, record.size()
        self.uses = 1


class _Client:
    """What one key's clients have stored, least recently used first. bytes: with what only others hold on to."""

    def __init__(self) -> None:
        self.nodes: OrderedDict[str, _Node] = OrderedDict()
        self.items: dict[str, _Node] = {}
        self.bytes = 0


class MemoryStore:
    """A ResponseStore in this process: gone when it ends, and bounded.

    Above a bound, the responses go that were longest not used, of the client that has most, so that nobody can push out
    all that others have.
    """

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self.max_responses, self.max_bytes = max_responses, max_bytes
        self.count = self.bytes = 0
        self._clients: dict[str, _Client] = {}  # as many as there are keys

    async def put(self, client: str, record: Record, history: Sequence[Record] = ()) -> None:
        own = self._clients.setdefault(client, _Client())
        parent = own.nodes.get(record.previous) if record.previous else None
        if parent is not None:
            parent.uses += 1
        else:
            for earlier in history:
                parent = self._add(own, earlier, parent)
        own.nodes[record.id] = self._add(own, record, parent)
        self.count += 1
        while self.count > self.max_responses:
            self._drop_oldest(max(self._clients.values(), key=lambda one: len(one.nodes)))
        while self.bytes > self.max_bytes:
            self._drop_oldest(max(self._clients.values(), key=lambda one: one.bytes))

    async def get(self, client: str, response_id: str) -> Record | None:
        node = self._find(client, response_id)
        return node.record if node else None

    async def history(self, client: str, response_id: str) -> list[Record] | None:
        node = self._find(client, response_id)
        if node is None:
            return None
        records = []
        while node is not None:
            records.append(node.record)
            node = node.parent
        return records[::-1]

    async def find_item(self, client: str, item_id: str) -> Record | None:
        node = self._clients[client].items.get(item_id) if client in self._clients else None
        return node.record if node else None

    async def delete(self, client: str, response_id: str) -> bool:
        own = self._clients.get(client)
        if own is None or response_id not in own.nodes:
            return False
        self._drop(own, response_id)
        return True

    async def usage(self) -> tuple[int, int]:
        return self.count, self.bytes

    def _add(self, own: _Client, record: Record, parent: _Node | None) -> _Node:
        node = _Node(record, parent)
        own.items.update(dict.fromkeys(record.item_ids, node))
        own.bytes += node.size
        self.bytes += node.size
        return node

    def _find(self, client: str, response_id: str) -> _Node | None:
        own = self._clients.get(client)
        node = own.nodes.get(response_id) if own else None
        if own is not None and node is not None:
            own.nodes.move_to_end(response_id)
        return node

    def _drop_oldest(self, own: _Client) -> None:
        self._drop(own, next(iter(own.nodes)))

    def _drop(self, own: _Client, response_id: str) -> None:
        node: _Node | None = own.nodes.pop(response_id)
        self.count -= 1
        while node is not None:
            node.uses -= 1
            if node.uses:
                return  # another continues it
            for item_id in node.record.item_ids:
                if own.items.get(item_id) is node:
                    del own.items[item_id]
            own.bytes -= node.size
            self.bytes -= node.size
            node = node.parent
