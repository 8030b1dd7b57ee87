"""The routes of open servers beyond training and sampling, and the descriptions that they publish.

The routes are those in the public code of the servers. A request with a known path and a wrong method gets a
405, with the method of the first route to this path in `Allow`. A request with an unknown path gets a 404
with the framework's text.
"""

from __future__ import annotations

import re
from typing import Any

from support.tinker_stub import API, Answer

Routes = tuple[tuple[str, str], ...]

_RUN = "/training_runs/{id}"
_LISTS: Routes = (
    ("GET", _RUN),
    ("GET", "/training_runs"),
    ("GET", _RUN + "/checkpoints/{id}/archive"),
    ("GET", _RUN + "/checkpoints/{id}/download"),
)
TX: Routes = (*_LISTS, ("GET", _RUN + "/checkpoints"), ("GET", "/models/{id}/checkpoints"))
SKY: Routes = (
    *_LISTS,
    ("DELETE", _RUN + "/checkpoints/{path:path}"),
    ("GET", _RUN + "/checkpoints"),
    ("GET", "/models/{id}/checkpoints"),
    ("GET", "/samplers/{id}"),
    ("POST", "/unload_model"),
)
TUFT: Routes = (
    ("GET", "/training_runs"),
    ("GET", _RUN),
    ("GET", _RUN + "/checkpoints"),
    ("DELETE", _RUN + "/checkpoints/{path:path}"),
    ("POST", _RUN + "/checkpoints/{path:path}/publish"),
    ("DELETE", _RUN + "/checkpoints/{path:path}/publish"),
    ("GET", _RUN + "/checkpoints/{path:path}/archive"),
    ("GET", "/checkpoints"),
    ("GET", "/sessions/{id}"),
    ("GET", "/sessions"),
    ("GET", "/samplers/{id}"),
    ("POST", "/unload_model"),
)
OPEN_RL: Routes = (("GET", "/list_adapters"),)

_ADAM = ("learning_rate", "beta1", "beta2", "eps")
_COMMON = {
    "create_model": {"session_id": {}, "base_model": {}, "lora_config": ("rank", "seed")},
    "optim_step": {"model_id": {}, "seq_id": {}, "adam_params": _ADAM},
    "save_weights": {"model_id": {}, "path": {}, "seq_id": {}, "type": {}},
    "save_weights_for_sampler": {"model_id": {}, "path": {}, "seq_id": {}, "sampling_session_seq_id": {}},
}
TX_BODIES: dict[str, Any] = {**_COMMON}
SKY_BODIES: dict[str, Any] = {
    **_COMMON,
    "optim_step": {"model_id": {}, "seq_id": {}, "adam_params": (*_ADAM, "weight_decay")},
}


def match(routes: Routes, method: str, name: str) -> Answer | None:
    """Return None if a request has a route, else the refusal of the request."""
    allowed = ""
    for way, template in routes:
        pattern = re.sub(r"\{(\w+)(:path)?\}", lambda slot: ".*" if slot[2] else "[^/]+", template)
        if re.fullmatch(pattern, name):
            if way == method:
                return None
            allowed = allowed or way
    if allowed:
        return Answer(405, {"detail": "Method Not Allowed"}, headers={"Allow": allowed})
    return Answer(404, {"detail": "Not Found"})


def describe(posts: tuple[str, ...], routes: Routes, bodies: dict[str, Any]) -> dict[str, Any]:
    """Return the published description of a server: its routes, and the fields of the bodies in `bodies`."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {}
    for method, template in (*(("POST", name) for name in posts), *routes):
        call = template.strip("/")
        operation: dict[str, Any] = {"responses": {}}
        if call in bodies:
            schema: dict[str, Any] = {"$ref": f"#/components/schemas/{call}"}
            schemas[call] = _object(bodies[call], call, schemas)
            operation["requestBody"] = {"content": {"application/json": {"schema": schema}}}
        published = API + template.replace(":path", "")
        paths.setdefault(published, {})[method.lower()] = operation
    return {"openapi": "3.1.0", "paths": paths, "components": {"schemas": schemas}}


def _object(fields: Any, name: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a body, and add the schemas of models within the body to `schemas`.

    A field whose value in `fields` is a tuple is such a model, and the tuple has the names of its fields.
    """
    properties: dict[str, Any] = {}
    for key, inner in fields.items():
        if isinstance(inner, tuple):
            schemas[f"{name}.{key}"] = {"type": "object", "properties": {each: {} for each in inner}}
            reference = {"$ref": f"#/components/schemas/{name}.{key}"}
            # A field that may be null has two forms in the schema.
            properties[key] = {"anyOf": [reference, {"type": "null"}]} if key == "lora_config" else reference
        else:
            properties[key] = {"title": key}
    return {"type": "object", "properties": properties, "title": name}
