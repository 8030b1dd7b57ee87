"""The routes and body fields that a server publishes at `/openapi.json`. Pure.

Open servers silently skip unknown fields of requests, and give the same answer for a missing route as for a
missing object. Most of them publish a description of themselves, which shows their routes and fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from attrs import field, frozen

from tinker_sync.errors import WireError
from tinker_sync.types._model import Model
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.endpoints import API, JSON, Endpoint

PATH: Final = "/openapi.json"
_SLOT: Final = re.compile(r"\{[^{}]*\}")  # linear on a path that closes no brace
_MAX_DEPTH: Final = 8  # of references to references

Place = tuple[str, ...]
"""The names on the way to a field of a body: ("adam_params", "grad_clip_norm")."""

# The fields that change the result of a call, each with the value that has no effect.
_EFFECTS: Final[Mapping[str, Mapping[Place, object]]] = {
    "optim_step": {("adam_params", "grad_clip_norm"): 0.0, ("adam_params", "weight_decay"): 0.0},
    "create_model": {
        ("lora_config", "seed"): None,
        ("lora_config", "train_attn"): True,
        ("lora_config", "train_mlp"): True,
        ("lora_config", "train_unembed"): True,
    },
}
# The fields without which a call has the same result.
_NOTES: Final[Mapping[str, Mapping[Place, object]]] = {
    "create_model": {("user_metadata",): None},
    "save_weights": {("ttl_seconds",): None, ("overwrite",): False, ("user_metadata",): None},
    "save_weights_for_sampler": {("ttl_seconds",): None, ("user_metadata",): None},
}


class UsedField(NamedTuple):
    """A field to which a request gives a value, and which a server may not know.

    `place` has the names of the outer fields, from the body inwards, and then the name of the field.

    >>> UsedField(("adam_params", "grad_clip_norm"), changes_result=True).name
    'adam_params.grad_clip_norm'
    """

    place: Place
    changes_result: bool
    """True if the call has another result without the field."""

    @property
    def name(self) -> str:
        """The names of `place`, joined by dots."""
        return ".".join(self.place)


def used_fields(call: str, request: Model) -> list[UsedField]:
    """Return the fields of a request that a server may not know, without those whose value changes nothing.

    Some fields, such as `ttl_seconds`, have an effect but do not change the result (`changes_result`).

    >>> from tinker_sync.types import SaveWeightsRequest
    >>> used_fields("save_weights", SaveWeightsRequest(model_id="m", path="a", ttl_seconds=60))
    [UsedField(place=('ttl_seconds',), changes_result=False)]
    """
    places = [(place, idle, True) for place, idle in _EFFECTS.get(call, {}).items()]
    places += [(place, idle, False) for place, idle in _NOTES.get(call, {}).items()]
    if not places:
        return []
    fields = request._fields_out()
    return [
        UsedField(place, changes_result)
        for place, idle, changes_result in places
        if _value_at(fields, place) not in (None, idle)
    ]


def _value_at(tree: Any, place: Place) -> Any:
    for name in place:
        if isinstance(tree, Model):
            tree = getattr(tree, name, None)
        else:
            tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


@frozen(eq=False)
class PublishedApi:
    """The routes and body fields that one server publishes. Immutable.

    >>> api = PublishedApi.read(b'{"paths": {"/api/v1/training_runs/{id}": {"get": {}}}}')
    >>> from tinker_sync.wire.endpoints import ENDPOINTS
    >>> api.offers(ENDPOINTS["get_training_run"]), api.offers(ENDPOINTS["list_sessions"])
    (True, False)
    """

    _routes: Mapping[str, Mapping[str, Any]] = field(repr=False)
    _schemas: Mapping[str, Any] = field(repr=False)

    @classmethod
    def read(cls, body: bytes) -> PublishedApi | None:
        """Return the description in a body, or None if the body does not describe this API."""
        try:
            tree = wire_json.loads(body)
        except WireError:
            return None
        paths = tree.get("paths") if isinstance(tree, Mapping) else None
        if not isinstance(paths, Mapping):
            return None
        routes = {
            _SLOT.sub("{}", path): methods
            for path, methods in paths.items()
            if path.startswith(API) and isinstance(methods, Mapping)
        }
        return cls(routes, tree) if routes else None

    def offers(self, endpoint: Endpoint) -> bool:
        """Return True if the server publishes a route for a call."""
        return self._operation(endpoint) is not None

    def drops(self, endpoint: Endpoint, place: Place) -> bool:
        """Return True if the published body of a call lacks a field, which the server then ignores silently.

        Return False if the body has the field, if the server refuses unknown fields, or if it does not
        publish the form of the body.
        """
        operation = self._operation(endpoint)
        schema = _value_at(operation, ("requestBody", "content", JSON, "schema"))
        for name in place:
            fields = self._fields(schema)
            if fields is None:
                return False
            if name not in fields:
                return True
            schema = fields[name]
        return False

    def _operation(self, endpoint: Endpoint) -> Mapping[str, Any] | None:
        methods = self._routes.get(_SLOT.sub("{}", endpoint.path.text), {})
        found = methods.get(endpoint.method.lower())
        return found if isinstance(found, Mapping) else None

    def _fields(self, schema: Any, depth: int = 0) -> Mapping[str, Any] | None:
        """Return the schemas of a body's fields, by name.

        Return None if the schema lists no fields or has several forms, and if it has `additionalProperties`:
        it then states that the server refuses or keeps unknown fields.
        """
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return None
        if isinstance(schema.get("$ref"), str):
            place = schema["$ref"].removeprefix("#/").split("/")
            return self._fields(_value_at(self._schemas, tuple(place)), depth + 1)
        branches = schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf")
        if isinstance(branches, Sequence):
            objects = [branch for branch in branches if branch != {"type": "null"}]
            return self._fields(objects[0], depth + 1) if len(objects) == 1 else None
        if "additionalProperties" in schema:
            return None
        fields = schema.get("properties")
        return fields if isinstance(fields, Mapping) else None
