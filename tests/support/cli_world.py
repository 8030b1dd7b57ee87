"""A stub server with fixed runs, checkpoints, an account and a bill, for the command line."""

from __future__ import annotations

import base64
import json
from typing import Any

from support.tinker_stub import Answer, Asked, Stub

NOW = "2026-03-01T12:00:00+00:00"
RUN = "5f0c2d5e-8f3b-4c8e-9d6c-2f4b7a1e3c90:train:0"
OTHER_RUN = "0b7d9a44-51c2-4f37-8a19-6d0e5b9f2c11:train:3"
SESSION = RUN.partition(":")[0]
PATH = f"tinker://{RUN}/weights/step-0100"
EXPORT = f"tinker://{RUN}/external_weights/export"
KEY = "tml-world"


def checkpoint(run: str, folder: str, name: str, **more: Any) -> dict[str, Any]:
    kinds = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
    return {
        "checkpoint_id": f"{folder}/{name}",
        "checkpoint_type": kinds[folder],
        "time": "2026-03-01T10:00:00Z",
        "tinker_path": f"tinker://{run}/{folder}/{name}",
        "size_bytes": 1_288_490_188,
        "public": False,
        **more,
    }


def token(**claims: Any) -> str:
    payload = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return f"eyJhbGciOiJub25lIn0.{payload}.c2ln"


class World(Stub):
    """A stub with the runs, checkpoints, sessions and bill of one user."""

    def __init__(self, behaviour: Any = None) -> None:
        super().__init__(behaviour)
        self.behaviour.config = {"fwdbwd_max_chunk_len": 1024, "pjwt_auth_enabled": True}
        self.undeletable: dict[str, int] = {}
        """Paths, and the status of the answer to their deletion."""
        self.sessions = [SESSION, OTHER_RUN.partition(":")[0]]
        self.checkpoints = [
            checkpoint(RUN, "weights", "step-0100"),
            checkpoint(
                RUN,
                "sampler_weights",
                "step-0100",
                size_bytes=40_265_318,
                time="2026-02-27T12:00:00.123456Z",
                expires_at="2026-03-08T13:00:00Z",
                public=True,
            ),
            checkpoint(RUN, "external_weights", "export", size_bytes=None, time="2026-03-01T11:59:30Z"),
            checkpoint(OTHER_RUN, "weights", "naïve-日本語", size_bytes=512, time="2025-11-30T08:00:00Z"),
        ]
        self.runs = [
            {
                "training_run_id": RUN,
                "base_model": "Qwen/Qwen3-30B-A3B-Instruct-2507",
                "model_owner": "tml:user:ada",
                "is_lora": True,
                "lora_rank": 32,
                "last_request_time": "2026-03-01T11:57:00Z",
                "last_checkpoint": self.checkpoints[0],
                "last_sampler_checkpoint": self.checkpoints[1],
                "user_metadata": {"purpose": "spelling"},
            },
            {
                "training_run_id": OTHER_RUN,
                "base_model": "meta-llama/Llama-3.1-8B",
                "model_owner": "tml:user:ada",
                "is_lora": False,
                "corrupted": True,
                "last_request_time": "2025-11-30T08:00:00Z",
            },
        ]

    def on_auth_token(self, asked: Asked) -> Any:
        return {
            "jwt": token(sub="tml:user:ada", org_id="engines", email="ada@example.com", exp=9_999_999_999)
        }

    def on_capabilities(self, asked: Asked) -> Any:
        def model(name: str, length: int | None, trainable: bool) -> dict[str, Any]:
            return {
                "model_name": name,
                "max_context_length": length,
                "trainable": trainable,
                "sampleable": True,
            }

        return {
            "supported_models": [
                model("Qwen/Qwen3-30B-A3B-Instruct-2507", 32768, True),
                model("meta-llama/Llama-3.1-8B", 131072, True),
                model("openai/gpt-oss-120b", None, False),
            ]
        }

    def on_other(self, asked: Asked, name: str) -> Any:
        if name == "/auth/apikey/me":
            return self._key(asked)
        if name == "/billing/usage/events":
            return BILL
        if name == "/billing/usage/checkpoints/current":
            return STORAGE
        return super().on_other(asked, name)

    def _key(self, asked: Asked) -> Any:
        if asked.headers.get("x-api-key") != KEY:
            return Answer(401, {"detail": "no such key"})
        if asked.method == "DELETE":
            return Answer(204)
        people = {"user_details": {"email": "ada@example.com"}, "org_details": {"name": "Analytical Engines"}}
        return {"key_id": 17, "name": "laptop", "note": "", "details": people}

    def rest(self, asked: Asked, parts: list[str]) -> Any:
        if parts == ["training_runs"]:
            page, cursor = self._page(asked, self.runs, 20)
            return {"training_runs": page, "cursor": cursor}
        if parts == ["checkpoints"]:
            page, cursor = self._page(asked, self.checkpoints, 100)
            return {"checkpoints": page, "cursor": cursor}
        if parts == ["sessions"]:
            return {"sessions": self._page(asked, self.sessions, 20)[0]}
        if parts[0] == "sessions":
            if parts[-1] == "trace_export":
                return {"status": "ready", "url": f"{self.url}/files/trace"}  # type: ignore[attr-defined]
            return super().rest(asked, parts)
        run = next((each for each in self.runs if each["training_run_id"] == parts[1]), None)
        if run is None:
            return Answer(404, {"detail": f"no training run {parts[1]}"})
        if len(parts) == 2:
            return run
        return self._of_run(asked, parts)

    def _of_run(self, asked: Asked, parts: list[str]) -> Any:
        own = [each for each in self.checkpoints if each["tinker_path"].startswith(f"tinker://{parts[1]}/")]
        if len(parts) == 3:
            return {"checkpoints": own, "cursor": None}
        path = f"tinker://{'/'.join([parts[1], *parts[3:5]])}"
        found = next((each for each in own if each["tinker_path"] == path), None)
        if found is None:
            return Answer(404, {"detail": f"no checkpoint {path}"})
        if asked.method == "DELETE" and len(parts) == 5:
            if path in self.undeletable:
                return Answer(self.undeletable[path], {"detail": "it is in use"})
            self.checkpoints.remove(found)
            return Answer(204)
        return {}

    def _page(self, asked: Asked, entries: list[Any], usual: int) -> tuple[list[Any], dict[str, int]]:
        limit = int(asked.query.get("limit", [str(usual)])[0])
        offset = int(asked.query.get("offset", ["0"])[0])
        cursor = {"offset": offset, "limit": limit, "total_count": len(entries)}
        return entries[offset : offset + limit], cursor


def _event(kind: str, cost: float | None, rate: float | None, **info: Any) -> dict[str, Any]:
    per = "gigabyte_month" if kind == "storage" else "million_tokens"
    return {
        "bucket_start": "2026-03-01T09:00:00Z",
        "bucket_end": "2026-03-01T10:00:00Z",
        "base_model": None if kind == "storage" else "meta-llama/Llama-3.1-8B",
        "user_id": "u-1",
        "user_name": "Ada",
        "session_id": None if kind == "storage" else SESSION,
        "project_id": "p-1",
        "estimated_cost_usd": cost,
        f"effective_rate_usd_per_{per}": rate,
        "event_info": {"type": kind, **info},
    }


BILL = {
    "data": [
        _event("training", 1.25, 0.5, token_count=2_500_000),
        _event("sampling_prefill", None, None, cached=True, token_count=40_000),
        _event("sampling_prefill", 0.02, 0.4, cached=False, token_count=50_000),
        _event("sampling_sample", 0.000123, 1.0, token_count=123),
        _event("checkpoint", None, None, count=3),
        _event("storage", 0.0004, 0.1, free=False, gigabyte_hours=2.88),
    ],
    "sessions": {SESSION: {"user_metadata": {"purpose": "spelling"}}, "other": {"user_metadata": None}},
    "cost_data_through": "2026-03-01T00:00:00Z",
}
STORAGE = {
    "effective_rate_usd_per_gigabyte_month": 0.1,
    "data": [
        {
            "project_id": "p-1",
            "org_user_urn": "tml:user:ada",
            "user_email": "ada@example.com",
            "user_name": "Ada",
            "checkpoint_count": 4,
            "size_bytes": 1_328_756_018,
            "size_gigabytes": 1.328756018,
            "estimated_monthly_cost_usd": 0.1328756018,
        },
        {"checkpoint_count": 1, "size_bytes": 5, "size_gigabytes": 5e-9},
    ],
}
