"""The durable state of the embedded server: one directory, one process, SQLite and safetensors files.

    store         `Store`, the public entry
    sessions, runs, checkpoints, ledger    the methods of `Store`, by table
    database      the connection, transactions, the schema; tables: the base class of the methods
    buffer        records that wait in memory for the next write: times of last use, usage, the audit log
    folders       folders of files that appear complete or not at all
    safetensors   the file format; peft: adapters in the files of the hosted service
    names, rows, errors                    checks, records and exceptions

Except for the records in `buffer`, writes are on the disk when they return: files are written to a staging
folder, flushed and renamed, and the row that refers to them is committed last. Opening the store removes the
incomplete files of a crash. Any thread may use a store. This package imports neither the HTTP server nor the
engine's computations.
"""

from __future__ import annotations

from tinker_sync.local.store.errors import StoreError
from tinker_sync.local.store.rows import (
    AuditRow,
    CheckpointRow,
    HourlyUsageRow,
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
    "RunRow",
    "SamplerRow",
    "SessionRow",
    "StorageRow",
    "Store",
    "StoreError",
]
