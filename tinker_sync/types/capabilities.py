"""The models that a server offers."""

from __future__ import annotations

from tinker_sync.types._model import Model, model


@model
class SupportedModel(Model):
    """A base model that a server offers, with the length of its context in tokens.

    `trainable` is True if the server can train the model at present, `sampleable` if it can sample from the
    model. A field is None if the server does not send it.

    >>> SupportedModel(model_name="org/base", trainable=True).sampleable is None
    True
    """

    __response__ = True

    model_name: str | None = None
    max_context_length: int | None = None
    trainable: bool | None = None
    sampleable: bool | None = None


@model
class GetServerCapabilitiesResponse(Model):
    """The models that the server offers.

    >>> offered = GetServerCapabilitiesResponse(supported_models=[{"model_name": "org/base"}])
    >>> [each.model_name for each in offered.supported_models]
    ['org/base']
    """

    __response__ = True

    supported_models: list[SupportedModel]
