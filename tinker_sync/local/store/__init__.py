"""The durable state of the embedded server: one directory, one process, SQLite and safetensors files.

    store         `Store`, the front of it all
    sessions, runs, checkpoints, ledger    the tables, one family each
    database      the connection, transactions, the schema
    shelf         directories of files that appear whole or not at all
    safetensors   the file format; peft: adapters as others read them
    names, rows, errors                    what goes in and out

What was acknowledged is on the disk: files are written beside, flushed, renamed, and the row that makes them
visible is committed last. What a crash leaves half-done is removed when the store is opened again.
"""

from __future__ import annotations

from tinker_sync.local.store.errors import StoreError
from tinker_sync.local.store.rows import (
    AuditRow,
    CheckpointRow,
    Lora,
    RunRow,
    SamplerRow,
    SessionRow,
    StorageRow,
    UsageRow,
)
from tinker_sync.local.store.store import Store

__all__ = [
    "AuditRow",
    "CheckpointRow",
    "Lora",
    "RunRow",
    "SamplerRow",
    "SessionRow",
    "StorageRow",
    "Store",
    "StoreError",
    "UsageRow",
]
