"""The upload of external weights. Experimental: the service may change it."""

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
    """A request to begin the upload of an adapter.

    Attributes:
        base_model: the model of the adapter.
        lora_config: the configuration of the adapter.
        destination_project_id: the target project; None means the default one.

    >>> ExternalWeightsUploadStartRequest(base_model="org/base", lora_config={"rank": 8}).lora_config.rank
    8
    """

    base_model: str
    lora_config: LoraConfig
    destination_project_id: str | None = None


@model
class ExternalWeightsUploadStartResult(Model):
    """A started upload: a signed URL for each file, which accepts a PUT until `expires`.

    Such a URL grants access to the file, so the repr shows only its host.

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
    """A request to finish an upload after all files have been sent."""

    upload_id: str


@model
class ExternalWeightsUploadFinishResult(Model):
    """The checkpoint created from an upload.

    >>> ExternalWeightsUploadFinishResult(tinker_path="tinker://run-1/external_weights/up-1").tinker_path
    'tinker://run-1/external_weights/up-1'
    """

    __response__ = True

    tinker_path: str
