"""Checkpoints: what the service lists, and the paths that name them."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attrs

from tinker_sync.errors import InvalidInputError
from tinker_sync.types._model import Model, model
from tinker_sync.types.scalars import CheckpointType

if TYPE_CHECKING:
    from typing_extensions import Self

_SCHEME = "tinker://"
_TYPE_OF_FOLDER: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


@model
class Checkpoint(Model):
    """One saved state of a model, as the service lists it.

    Attributes:
        checkpoint_id: folder and name, such as "weights/step-100".
        time: when it was saved.
        public: whether everybody may read it.
        expires_at: when the service deletes it; None is never.
        base_model: what it was trained from; None where the server does not say. Experimental.

    >>> Checkpoint(
    ...     checkpoint_id="weights/final",
    ...     checkpoint_type="training",
    ...     time="2026-01-31T12:00:00Z",
    ...     tinker_path="tinker://run-1/weights/final",
    ... ).time.year
    2026
    """

    __response__ = True

    checkpoint_id: str
    checkpoint_type: CheckpointType
    time: datetime
    tinker_path: str
    size_bytes: int | None = None
    public: bool = False
    user_metadata: dict[str, str] | None = None
    expires_at: datetime | None = None
    base_model: str | None = None

    def _fields_out(self) -> dict[str, Any]:
        out = Model._fields_out(self)
        if self.base_model is None:  # as a service has it that does not know the field
            del out["base_model"]
        return out


@model
class ParsedCheckpointTinkerPath(Model):
    """A checkpoint's path and its parts.

    >>> parsed = ParsedCheckpointTinkerPath.from_tinker_path("tinker://run-1/sampler_weights/final")
    >>> parsed.training_run_id, parsed.checkpoint_type, parsed.checkpoint_id
    ('run-1', 'sampler', 'sampler_weights/final')
    """

    __response__ = True

    tinker_path: str
    training_run_id: str
    checkpoint_type: CheckpointType
    checkpoint_id: str

    @classmethod
    def from_tinker_path(cls, tinker_path: str) -> Self:
        """Take a path apart.

        Raises:
            InvalidInputError: it is not ``tinker://RUN/FOLDER/NAME`` with one of the three known folders.

        >>> ParsedCheckpointTinkerPath.from_tinker_path("tinker://run-1/final")
        Traceback (most recent call last):
            ...
        tinker_sync.errors.InvalidInputError: 'tinker://run-1/final': expected tinker://RUN/FOLDER/NAME, ...
        """
        parts = tinker_path[len(_SCHEME) :].split("/")
        # A run or name that is empty or dots would lead to the address of something else.
        well_formed = tinker_path.startswith(_SCHEME) and len(parts) == 3 and not {"", ".", ".."} & set(parts)
        if not well_formed or parts[1] not in _TYPE_OF_FOLDER:
            raise InvalidInputError(
                f"{tinker_path!r}: expected {_SCHEME}RUN/FOLDER/NAME, "
                f"where FOLDER is one of {', '.join(_TYPE_OF_FOLDER)}"
            )
        run, folder, name = parts
        return cls(
            tinker_path=tinker_path,
            training_run_id=run,
            checkpoint_type=_TYPE_OF_FOLDER[folder],
            checkpoint_id=f"{folder}/{name}",
        )


@model
class Cursor(Model):
    """Where a page of a list stands: its offset and size, and how many entries there are in all.

    >>> Cursor(offset=0, limit=20, total_count=3).total_count
    3
    """

    __response__ = True

    offset: int
    limit: int
    total_count: int


@model
class CheckpointsListResponse(Model):
    """A page of checkpoints. `cursor` is None where the list is not cut into pages.

    >>> CheckpointsListResponse(checkpoints=[], cursor={"offset": 0, "limit": 100, "total_count": 0}).cursor
    Cursor(offset=0, limit=100, total_count=0)
    """

    __response__ = True

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None


@model
class ExternalWeightsUrlsResponse(Model):
    """Where the files of an external checkpoint can be fetched: a signed URL for each path, until `expires`.

    Whoever holds such a URL can read the file, so the repr shows only its host.

    >>> ExternalWeightsUrlsResponse(urls={"a.bin": "https://files.example/x?sig=abc"}, expires="2026-01-31")
    ExternalWeightsUrlsResponse(urls={'a.bin': 'https://files.example/…'}, expires=...)
    """

    __response__ = True

    urls: dict[str, str] = attrs.field(repr=False)
    expires: datetime

    def _repr_items(self) -> Iterable[tuple[str, Any]]:
        return (
            ("urls", {path: host_only(url) for path, url in self.urls.items()}),
            ("expires", self.expires),
        )


def host_only(url: str) -> str:
    """What of a signed URL may be shown."""
    try:
        parts = urlsplit(url)
    except ValueError:  # such as an unclosed "["
        return "…"
    return f"{parts.scheme}://{parts.hostname}/…"
