"""Bringing weights from elsewhere to the service. Experimental: the service may change it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any

import attrs

from tinker_sync.types._model import Model, model
from tinker_sync.types.checkpoint import host_only
from tinker_sync.types.model import LoraConfig


@model
class ExternalWeightsUploadStartRequest(Model):
    """Begin to upload an adapter.

    Attributes:
        base_model: what it is an adapter of.
        lora_config: how it is built.
        destination_project_id: where it goes; None is the default project.

    >>> ExternalWeightsUploadStartRequest(base_model="org/base", lora_config={"rank": 8}).lora_config.rank
    8
    """

    base_model: str
    lora_config: LoraConfig
    destination_project_id: str | None = None


@model
class ExternalWeightsUploadStartResult(Model):
    """An upload that has begun: a signed URL for each file, to be sent there with PUT until `expires`.

    Whoever holds such a URL can write the file, so the repr shows only its host.

    >>> ExternalWeightsUploadStartResult(
    ...     upload_id="up-1", urls={"a.bin": "https://files.example/x?sig=abc"}, expires="2026-01-31"
    ... )
    ExternalWeightsUploadStartResult(upload_id='up-1', urls={'a.bin': 'https://files.example/…'}, expires=...)
    """

    __response__ = True

    upload_id: str
    urls: dict[str, str] = attrs.field(repr=False)
    expires: datetime

    def _repr_items(self) -> Iterable[tuple[str, Any]]:
        hosts = {path: host_only(url) for path, url in self.urls.items()}
        return (("upload_id", self.upload_id), ("urls", hosts), ("expires", self.expires))


@model
class ExternalWeightsUploadFinishRequest(Model):
    """All files of an upload are there."""

    upload_id: str


@model
class ExternalWeightsUploadFinishResult(Model):
    """The checkpoint that an upload has become.

    >>> ExternalWeightsUploadFinishResult(tinker_path="tinker://run-1/external_weights/up-1").tinker_path
    'tinker://run-1/external_weights/up-1'
    """

    __response__ = True

    tinker_path: str
