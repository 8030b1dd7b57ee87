"""Checkpoints, as the service lists them, and their paths."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attrs

from tinker_sync._base.displays import to_pandas
from tinker_sync.errors import InvalidInputError
from tinker_sync.types._model import Model, model
from tinker_sync.types.scalars import CheckpointType

if TYPE_CHECKING:
    from typing_extensions import Self

_SCHEME = "tinker://"
_TYPES_BY_FOLDER: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


@model
class Checkpoint(Model):
    """One saved state of a model, as the service lists it.

    Attributes:
        checkpoint_id: the folder and the name, such as "weights/step-100".
        time: the moment of saving.
        public: True if all users may read it.
        expires_at: the moment of its deletion; None means never.
        base_model: the base model; None if the server does not send it. Experimental.

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
        if self.base_model is None:  # older services do not send the field
            del out["base_model"]
        return out


@model
class ParsedCheckpointTinkerPath(Model):
    """The ``tinker://`` path of a checkpoint, and the parts of the path.

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
    def from_tinker_path(cls, tinker_path: str, *, bare: bool = False) -> Self:
        """Parse the path of a checkpoint.

        Args:
            tinker_path: the path.
            bare: take ``tinker://RUN/NAME`` as the path of a sampler checkpoint, as open servers do.

        Raises:
            InvalidInputError: the path is not ``tinker://RUN/FOLDER/NAME``, or the folder is none of
                `weights`, `sampler_weights` and `external_weights`.

        >>> ParsedCheckpointTinkerPath.from_tinker_path("tinker://run-1/final")
        Traceback (most recent call last):
            ...
        tinker_sync.errors.InvalidInputError: 'tinker://run-1/final': expected tinker://RUN/FOLDER/NAME, ...
        """
        parts = tinker_path[len(_SCHEME) :].split("/")
        if bare and len(parts) == 2:
            parts.insert(1, "sampler_weights")
        # An empty or dotted run or name would lead to another address.
        well_formed = tinker_path.startswith(_SCHEME) and len(parts) == 3 and not {"", ".", ".."} & set(parts)
        if not well_formed or parts[1] not in _TYPES_BY_FOLDER:
            raise InvalidInputError(
                f"{tinker_path!r}: expected {_SCHEME}RUN/FOLDER/NAME, "
                f"where FOLDER is one of {', '.join(_TYPES_BY_FOLDER)}"
            )
        run, folder, name = parts
        return cls(
            tinker_path=tinker_path,
            training_run_id=run,
            checkpoint_type=_TYPES_BY_FOLDER[folder],
            checkpoint_id=f"{folder}/{name}",
        )

    @property
    def directory_name(self) -> str:
        """The name of the directory that a download makes by default.

        >>> ParsedCheckpointTinkerPath.from_tinker_path("tinker://run-1/weights/step 1").directory_name
        'run-1_weights_step 1'
        """
        name = self.tinker_path.removeprefix(_SCHEME).replace("/", "_")
        return name.replace(":", "_") if os.name == "nt" else name


@model
class Cursor(Model):
    """The position of a page in a list.

    `offset` is the index of the first entry on the page, `limit` the size of a page, and `total_count` the
    number of entries in the list.

    >>> Cursor(offset=0, limit=20, total_count=3).total_count
    3
    """

    __response__ = True

    offset: int
    limit: int
    total_count: int


@model
class CheckpointsListResponse(Model):
    """A page of checkpoints. `cursor` is None if the answer is the whole list.

    >>> CheckpointsListResponse(checkpoints=[], cursor={"offset": 0, "limit": 100, "total_count": 0}).cursor
    Cursor(offset=0, limit=100, total_count=0)
    """

    __response__ = True

    checkpoints: list[Checkpoint]
    cursor: Cursor | None = None

    to_pandas = to_pandas


@model
class ExternalWeightsUrlsResponse(Model):
    """The signed URLs of the files of an exported checkpoint, by file name. They are valid until `expires`.

    Such a URL grants access to the file, so the repr shows only its host.

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
    """Return the scheme and the host of a signed URL, without the parts that grant access."""
    try:
        parts = urlsplit(url)
    except ValueError:  # for example an unclosed "["
        return "…"
    return f"{parts.scheme}://{parts.hostname}/…"
