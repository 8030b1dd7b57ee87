"""A server of long lists that change while a client reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from support.tinker_stub import Answer, Asked, Behaviour, Stub

Change = Callable[[list[Any]], object]


class ListServer(Stub):
    """A stub that lists `entries`, newest first, as runs, checkpoints and sessions.

    Args:
        count: the number of entries at the beginning.
        then: changes of the entries, by the number of the page after which they happen, from 1.
        most: the largest page that the server sends.
        refuse_over: the server refuses requests for larger pages than this.
        offsets: False if the server ignores offsets.
        totals: False if the server sends no total count.
    """

    def __init__(
        self,
        count: int = 0,
        *,
        then: dict[int, Change] | None = None,
        most: int | None = None,
        refuse_over: int | None = None,
        offsets: bool = True,
        totals: bool = True,
    ) -> None:
        super().__init__(Behaviour())
        self.entries = [f"e-{number:06}" for number in range(count)]
        self._then = then or {}
        self._most = most
        self._refuse_over = refuse_over
        self._offsets = offsets
        self._totals = totals
        self.pages = 0

    def asked_for(self) -> list[tuple[int, int]]:
        """Return the wanted size and the offset of each requested page, in order of arrival."""
        pages = [asked.query for asked in list(self.log) if "limit" in asked.query]
        return [(int(query["limit"][0]), int(query["offset"][0])) for query in pages]

    def rest(self, asked: Asked, parts: list[str]) -> Any:
        size = int(asked.query.get("limit", ["1000000"])[0])
        offset = int(asked.query.get("offset", ["0"])[0]) if self._offsets else 0
        if self._refuse_over is not None and size > self._refuse_over:
            return Answer(422, {"detail": "limit is too large"})
        names = self.entries[offset : offset + min(size, self._most or size)]
        cursor = {"offset": offset, "limit": size, "total_count": len(self.entries)}
        self.pages += 1
        if self.pages in self._then:
            self._then[self.pages](self.entries)
        if parts == ["sessions"]:
            return {"sessions": names}
        if parts == ["training_runs"]:
            return {"training_runs": [run(name) for name in names], "cursor": cursor}
        return {
            "checkpoints": [checkpoint(name) for name in names],
            **({"cursor": cursor} if self._totals else {}),
        }


def run(name: str) -> dict[str, Any]:
    return {
        "training_run_id": name,
        "base_model": "stub/model",
        "model_owner": "someone",
        "is_lora": True,
        "last_request_time": "2026-01-01T00:00:00Z",
    }


def checkpoint(name: str) -> dict[str, Any]:
    return {
        "checkpoint_id": f"weights/{name}",
        "checkpoint_type": "training",
        "time": "2026-01-01T00:00:00Z",
        "tinker_path": f"tinker://run/weights/{name}",
        "size_bytes": 1000,
    }
