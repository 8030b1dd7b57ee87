"""The settings of a server: those it sends to clients, and its own."""

from __future__ import annotations

from typing import Any

import attrs

from tinker_sync.errors import ConfigurationError
from tinker_sync.types.service import ClientConfigResponse, ClientDynamicConfigResponse

_MIB = 1024 * 1024


def _client_defaults() -> ClientConfigResponse:
    # With this setting, each copy of a sampling client asks the server for its number among the copies.
    return ClientConfigResponse(sample_join_sampling_session=True)


def _dynamic_defaults() -> ClientDynamicConfigResponse:
    return ClientDynamicConfigResponse(sample_cancel_enabled=True)


@attrs.frozen(kw_only=True)
class Flags:
    """The settings of a server.

    Attributes:
        client: the answer to `client/config`.
        dynamic: the answer to `client/dynamic_config`.
        json_only: answer like a server from before `client/config`: JSON bodies and results, a separate call
            for forward passes, no sequence ids, and none of the newer calls.
        hold_s: the longest time for which a poll is held open.
        metadata_over_bytes: the size of a result above which a poll that allows it gets only the size.
        max_body_bytes: the most bytes of the body of a call, before and after decompression.
        gap_patience_s: the time for which requests of a model wait for a missing smaller sequence number.
            Then the number is skipped. The time begins anew when the model accepts a numbered request, and
            when another number is the missing one.
        abandoned_after_s: the time without a heartbeat or a new request after which a session loses its
            models, unsaved samplers and custom losses. The outcome of a sample request that names no session
            stays for this time.
        release_s: the time for which models stay after the end of their session, for processes that still
            fetch results. The outcome of a request that was under way at a release stays for the same time.
        token_life_s: the time for which an exchanged token is valid.
        url_life_s: the time for which the address of a file is valid.
        max_rank: the largest rank of an adapter.
        max_cells: the largest size of each array of scores that one sample request may ask for, and the
            largest number of samples, which is limited to `convert.MOST_SAMPLES` as well.
        kept_results_bytes: the most bytes of fetched results to keep, for clients that lost the response.
            The result fetched last is kept in any case.
        adapter_bytes: the most bytes of samplers' adapters in memory, beyond which the least recently used
            ones leave it.
        seed: decides ids and the choices that clients leave to the server, such as the seeds of samples;
            None: at random.

    >>> Flags.of(fwdbwd_max_chunk_len=2, hold_s=1).client.fwdbwd_max_chunk_len
    2
    """

    client: ClientConfigResponse = attrs.field(factory=_client_defaults)
    dynamic: ClientDynamicConfigResponse = attrs.field(factory=_dynamic_defaults)
    json_only: bool = False
    hold_s: float = 30.0
    metadata_over_bytes: int = 1 * _MIB
    max_body_bytes: int = 256 * _MIB
    gap_patience_s: float = 60.0
    abandoned_after_s: float = 3600.0
    release_s: float = 60.0
    token_life_s: float = 3600.0
    url_life_s: float = 900.0
    max_rank: int = 256
    max_cells: int = 4_000_000
    kept_results_bytes: int = 64 * _MIB
    adapter_bytes: int = 512 * _MIB
    seed: int | None = None

    @classmethod
    def of(cls, **settings: Any) -> Flags:
        """Return the default flags with some settings changed.

        The name of a setting is a field of `Flags`, of its `client` or of its `dynamic`.

        Raises:
            ConfigurationError: a setting is unknown.
        """
        own = {field.name for field in attrs.fields(cls)} - {"client", "dynamic"}
        flags = cls(**{name: value for name, value in settings.items() if name in own})
        for group in ("client", "dynamic"):
            model = getattr(flags, group)
            names = {field.name for field in attrs.fields(type(model))}
            chosen = {name: settings[name] for name in settings if name in names}
            flags = attrs.evolve(flags, **{group: model.model_copy(update=chosen)})
            own |= names
        unknown = sorted(set(settings) - own)
        if unknown:
            raise ConfigurationError(f"the server has no setting {', '.join(unknown)}")
        return flags
