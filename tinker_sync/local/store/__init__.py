"""The durable state of the embedded server: one directory, one process, SQLite and safetensors files.

    store      `Store`, the public entry
    database   the SQLite file: schema, migrations, transactions, errors
    folders    the lock of the directory, and folders of files that appear complete or not at all
    peft       adapters in the files of the hosted service

Except for usage and the last use of runs, writes are on the disk when they return: files are written to a
staging folder, flushed and renamed, and the row that refers to them is committed last. Opening the store
removes the incomplete files of a crash. Any thread may use a store. What it returns are the types of the
protocol. This package imports neither the HTTP server nor the engine's computations.
"""

from __future__ import annotations

from tinker_sync.local.store.database import StoreError
from tinker_sync.local.store.store import FOLDERS, USER, USER_EMAIL, CheckpointKind, Store, StoredSampler

__all__ = ["FOLDERS", "USER", "USER_EMAIL", "CheckpointKind", "Store", "StoreError", "StoredSampler"]
