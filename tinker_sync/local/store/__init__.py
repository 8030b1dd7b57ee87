"""The durable state of the embedded server: one directory, one process, SQLite and safetensors files.

    store         `Store`, the public entry
    sessions, runs, checkpoints, ledger    the tables, one family each
    database      the connection, transactions, the schema
    folders       folders of files that appear complete or not at all
    safetensors   the file format; peft: adapters in the layout of the PEFT library
    names, rows, errors                    checks, records and exceptions

Acknowledged writes are on the disk: files are written to a staging folder, flushed and renamed, and the row
that refers to them is committed last. Opening the store removes the incomplete files of a crash. Any thread
may use a store. This package imports neither the HTTP server nor the engine's computations.
"""

from __future__ import annotations

from tinker_sync.local.store.errors import StoreError
from tinker_sync.local.store.rows import (
    AuditRow,
    CheckpointRow,
    HourlyUsageRow,
    Lora,
    RunRow,
    SamplerRow,
    SessionRow,
    StorageRow,
)
from tinker_sync.local.store.store import Store

__all__ = [
    "AuditRow",
    "CheckpointRow",
    "HourlyUsageRow",
    "Lora",
    "RunRow",
    "SamplerRow",
    "SessionRow",
    "StorageRow",
    "Store",
    "StoreError",
]
