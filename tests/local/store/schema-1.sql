-- The database of versions up to 0.2. It never changes.
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    created INTEGER NOT NULL,
    seen INTEGER NOT NULL,
    tags TEXT NOT NULL,
    user_metadata TEXT,
    sdk_version TEXT,
    project_id TEXT,
    display_name TEXT,
    status TEXT NOT NULL
);
CREATE INDEX sessions_by_time ON sessions (created, id);
CREATE TABLE runs (
    id TEXT PRIMARY KEY,
    session_id TEXT NOT NULL REFERENCES sessions (id),
    model_seq_id INTEGER NOT NULL,
    base_model TEXT NOT NULL,
    lora TEXT NOT NULL,
    optimizer_config TEXT NOT NULL,
    user_metadata TEXT,
    project_id TEXT,
    created INTEGER NOT NULL,
    seen INTEGER NOT NULL,
    corrupted INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX runs_by_time ON runs (created, id);
CREATE INDEX runs_by_session ON runs (session_id, model_seq_id);
CREATE TABLE samplers (
    id TEXT PRIMARY KEY,
    session_id TEXT NOT NULL REFERENCES sessions (id),
    base_model TEXT NOT NULL,
    model_path TEXT,
    created INTEGER NOT NULL
);
CREATE INDEX samplers_by_session ON samplers (session_id, created);
CREATE TABLE checkpoints (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    run_id TEXT NOT NULL REFERENCES runs (id),
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    created INTEGER NOT NULL,
    expires INTEGER,
    published INTEGER NOT NULL DEFAULT 0,
    user_metadata TEXT,
    info TEXT NOT NULL,
    folder TEXT NOT NULL UNIQUE,
    files TEXT NOT NULL,
    size_bytes INTEGER NOT NULL,
    UNIQUE (run_id, kind, name)
);
CREATE INDEX checkpoints_by_expiry ON checkpoints (expires) WHERE expires IS NOT NULL;
CREATE TABLE stored (
    checkpoint INTEGER PRIMARY KEY,
    project_id TEXT,
    size_bytes INTEGER NOT NULL,
    since INTEGER NOT NULL,
    until INTEGER
);
CREATE TABLE usage (
    hour INTEGER NOT NULL,
    session_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    base_model TEXT NOT NULL,
    kind TEXT NOT NULL,
    amount INTEGER NOT NULL,
    PRIMARY KEY (hour, session_id, run_id, base_model, kind)
) WITHOUT ROWID;
CREATE TABLE audit (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    at INTEGER NOT NULL,
    event TEXT NOT NULL,
    detail TEXT NOT NULL
);
CREATE INDEX audit_by_time ON audit (at);
PRAGMA user_version = 1;
