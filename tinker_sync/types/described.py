"""Sessions and samplers, as the server describes them."""

from __future__ import annotations

from tinker_sync.types._model import Model, model


@model
class GetSamplerResponse(Model):
    """The base model of a sampler, and its checkpoint if it has one.

    >>> GetSamplerResponse(sampler_id="s-1:sample:0", base_model="org/base").model_path is None
    True
    """

    __response__ = True

    sampler_id: str
    base_model: str
    model_path: str | None = None


@model
class GetSamplerResponseInternal(GetSamplerResponse):
    """A sampler with its tokenizer. The embedded server and some others send the tokenizer.

    >>> GetSamplerResponseInternal(sampler_id="s-1:sample:0", base_model="org/base").tokenizer_id is None
    True
    """

    __response__ = True

    tokenizer_id: str | None = None


@model
class GetSessionResponse(Model):
    """The training runs and samplers of a session.

    >>> GetSessionResponse(training_run_ids=["s-1:train:0"], sampler_ids=[]).training_run_ids
    ['s-1:train:0']
    """

    __response__ = True

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


@model
class ListSessionsResponse(Model):
    """A page of session ids.

    >>> ListSessionsResponse(sessions=["s-1", "s-2"]).sessions
    ['s-1', 's-2']
    """

    __response__ = True

    sessions: list[str]
