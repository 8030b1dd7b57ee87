"""Checks of the arguments of client methods. Each error names the argument and the remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final, NoReturn, get_args

from tinker_sync._base.secret import mask_url
from tinker_sync._base.spelling import find_closest
from tinker_sync.errors import ConfigurationError, InvalidInputError
from tinker_sync.types._structured import described_class, is_foreign
from tinker_sync.types.model_input import ModelInput
from tinker_sync.types.sampling import SamplingParams
from tinker_sync.types.scalars import LossFnType

if TYPE_CHECKING:
    from tinker_sync.config import Settings
    from tinker_sync.types.optim import AdamParams

_MODEL: Final = re.compile(r"[\w.-]+/[\w.:-]+")


def check_service(
    *,
    user_metadata: Any,
    timeout: Any,
    deadline: Any,
    on_queue_state: Any,
) -> None:
    """Check those arguments of `ServiceClient` that no other module checks.

    Raises:
        ConfigurationError: an argument has a wrong type or value.

    >>> check_service(user_metadata="local", timeout=None, deadline=None, on_queue_state=None)
    Traceback (most recent call last):
    tinker_sync.errors.ConfigurationError: user_metadata: expected a dictionary, got 'local'; the address of \
a server goes into base_url: ServiceClient(base_url='local')
    """
    if isinstance(user_metadata, str):
        shown = mask_url(user_metadata)
        hint = ""
        if "://" in shown or find_closest(shown, ["local"], cutoff=0.8, loosely=False):
            meant = shown if "://" in shown else "local"
            hint = f"; the address of a server goes into base_url: ServiceClient(base_url={meant!r})"
        raise ConfigurationError(f"user_metadata: expected a dictionary, got {shown!r}{hint}")
    if user_metadata is not None and not isinstance(user_metadata, Mapping):
        raise ConfigurationError(
            f"user_metadata: expected a dictionary, got a {type(user_metadata).__name__}"
        )
    if isinstance(timeout, str):
        raise ConfigurationError(f"timeout: expected a number of seconds, got {timeout!r}")
    if deadline is not None and not _is_positive(deadline):
        raise ConfigurationError(
            "deadline: expected more than 0 seconds, or None for five minutes to twelve hours, by kind of "
            f"call, got {deadline!r}"
        )
    if on_queue_state is not None and not callable(on_queue_state):
        raise ConfigurationError(
            f"on_queue_state: expected a function that takes a QueueReport, got {on_queue_state!r}"
        )


def _is_positive(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and value > 0
        and not math.isnan(value)
    )


def check_credential(settings: Settings) -> None:
    """Check that there is a credential for the hosted service, before the first call needs it.

    Raises:
        CredentialError: the settings have neither a key nor a command that prints one.
    """
    if settings.is_vendor_host and settings.api_key is None and settings.credential_cmd is None:
        from tinker_sync.transport.auth import choose_source

        choose_source(settings, enforce_cmd=False)


def check_base_model(base_model: Any, call: str) -> None:
    """Check that a value is the name of a base model.

    Raises:
        InvalidInputError: the value is empty, is not a string, or is the path of a checkpoint.
    """
    if not isinstance(base_model, str) or not base_model:
        raise InvalidInputError(
            f"{call}: base_model must name a model, got {base_model!r}; get_server_capabilities lists them"
        )
    if base_model.startswith("tinker://"):
        raise InvalidInputError(
            f"{call}: base_model is the path of a checkpoint, {base_model!r}; "
            "train on from it with create_training_client_from_state(path)"
        )


def check_path(path: Any, call: str, settings: Settings) -> None:
    """Check the form of a checkpoint's path, as far as all servers agree on it.

    Raises:
        InvalidInputError: the path cannot name a checkpoint.
    """
    check_is_path(path, call)
    if path.startswith("tinker://"):
        # Nothing else is checked, because some servers use other folders for checkpoints, or no folder.
        if {"", ".", ".."} & set(path.removeprefix("tinker://").split("/")):
            _refuse_path(path, call)
        if settings.is_vendor_host or settings.api_key_source == "local":
            refuse_bare_path(path, call)
    elif settings.is_vendor_host:
        raise InvalidInputError(f"{call}: the path must start with 'tinker://', got {path!r}")


def refuse_bare_path(path: str, call: str) -> None:
    """Refuse `tinker://RUN`, a path of sampler weights that only some servers of older protocols take.

    Raises:
        InvalidInputError: the path has one part.
    """
    if path.startswith("tinker://") and "/" not in path.removeprefix("tinker://"):
        _refuse_path(path, call)


def _refuse_path(path: str, call: str) -> NoReturn:
    raise InvalidInputError(f"{call}: expected a path like tinker://RUN/FOLDER/NAME, got {path!r}")


def check_is_path(path: Any, call: str = "") -> None:
    """Check that the path of a checkpoint is text, and not the future or the result that has it.

    Raises:
        InvalidInputError: the path is empty or is not a string.
    """
    if isinstance(path, str) and path:
        return
    got = repr(path) if path is None or isinstance(path, (str, int, float)) else f"a {type(path).__name__}"
    hint = ""
    if isinstance(getattr(path, "path", None), str):
        hint = "; give its .path"
    elif isinstance(path, Future):
        hint = "; give the path of a save: save_state(name).result().path"
    where = f"{call}: path" if call else "path"
    raise InvalidInputError(f"{where}: the path of a checkpoint is text, got {got}{hint}")


def check_sampler_path(path: Any, settings: Settings) -> None:
    """Check that a path can name weights for sampling, and is not the name of a model.

    Raises:
        InvalidInputError: the path cannot be sampled from; the message names the right argument or call.
    """
    check_path(path, "create_sampling_client", settings)
    if _MODEL.fullmatch(path):
        raise InvalidInputError(
            f"create_sampling_client: {path!r} is no path of weights, which begins with tinker://; "
            f"for a base model write create_sampling_client(base_model={path!r})"
        )
    if _folder_of(path) == "weights":
        raise InvalidInputError(
            f"create_sampling_client: {path!r} is a checkpoint for training; "
            "sample from the path that save_weights_for_sampler returns, tinker://RUN/sampler_weights/NAME"
        )


def check_state_path(path: Any, call: str) -> None:
    """Check that a path can name a checkpoint for training.

    Raises:
        InvalidInputError: the path names weights for sampling, is only the name of a checkpoint, or is not a
            text.
    """
    check_is_path(path, call)
    if _folder_of(path) == "sampler_weights":
        raise InvalidInputError(
            f"{call}: {path!r} has weights for sampling only; "
            "train on from the path that save_state returns, tinker://RUN/weights/NAME"
        )
    if not path.startswith("tinker://") and "/" not in path:
        raise InvalidInputError(
            f"{call}: {path!r} is a name; give the path that save_state returns, tinker://RUN/weights/NAME"
        )


def _folder_of(path: str) -> str:
    parts = path.removeprefix("tinker://").split("/")
    return parts[1] if path.startswith("tinker://") and len(parts) == 3 else ""


def check_sample(prompt: Any, num_samples: Any = 1, sampling_params: Any = None) -> None:
    """Check the arguments of `sample` for common mistakes. The message suggests the argument that fits.

    Raises:
        InvalidInputError: an argument has a wrong class, the prompt is empty, or `max_tokens` is 0.
    """
    if not isinstance(prompt, (ModelInput, Mapping)) and not is_foreign(ModelInput, prompt):
        if isinstance(prompt, str):
            remedy = "ModelInput.from_text(text, tokenizer)"
        elif isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], Mapping):
            remedy = "ModelInput.from_chat(messages, tokenizer)"
        else:
            remedy = "ModelInput.from_ints(token_ids)"
        raise InvalidInputError(
            f"prompt: expected a ModelInput, got {described_class('ModelInput', prompt)}; {remedy} makes one"
        )
    if isinstance(prompt, ModelInput) and prompt.known_length() == 0:
        raise InvalidInputError(
            "prompt: is empty; give at least one token, such as the tokenizer's bos_token_id"
        )
    if isinstance(num_samples, SamplingParams):
        raise InvalidInputError(
            "num_samples: expected a number, got SamplingParams; the order is "
            "sample(prompt, num_samples, sampling_params)"
        )
    if not (
        sampling_params is None
        or isinstance(sampling_params, (SamplingParams, Mapping))
        or is_foreign(SamplingParams, sampling_params)
    ):
        got = described_class("SamplingParams", sampling_params)
        raise InvalidInputError(f"sampling_params: expected SamplingParams, got {got}")
    longest = sampling_params.max_tokens if isinstance(sampling_params, SamplingParams) else None
    if longest == 0:
        raise InvalidInputError(
            "sampling_params.max_tokens: expected 1 or more, got 0; compute_logprobs scores a prompt alone"
        )


def refuse_loss(loss_fn: Any) -> NoReturn:
    """Refuse a loss that is not a name. The message differs for functions and for other objects.

    Raises:
        InvalidInputError: always.
    """
    if callable(loss_fn):
        name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        raise InvalidInputError(
            f"loss_fn: expected the name of a loss, got the function {name}; "
            "forward_backward_custom and forward_custom take losses of your own"
        )
    raise InvalidInputError(
        f"loss_fn: expected the name of a loss such as 'cross_entropy', got {type(loss_fn).__name__}"
    )


_PLAIN_LOSSES: Final = {name.replace("_", ""): name for name in get_args(LossFnType)}


def check_loss(loss_fn: str) -> None:
    """Refuse a misspelt name of a loss of the protocol.

    Other names pass, because a server may have losses of its own.

    Raises:
        InvalidInputError: the name is a misspelling of a known one.
    """
    if loss_fn in _PLAIN_LOSSES.values():
        return
    plain = "".join(filter(str.isalnum, loss_fn.lower()))
    meant = _PLAIN_LOSSES.get(plain)
    if meant is None:
        # A short name that is close to another may be that of a server's own loss, as grpo is close to gspo.
        long = [each for each in _PLAIN_LOSSES if len(each) > 8 and each not in plain]
        meant = _PLAIN_LOSSES.get(find_closest(plain, long, cutoff=0.85, loosely=False) or "")
    if meant is not None or not plain:
        hint = f"did you mean {meant!r}?" if plain else "give one such as 'cross_entropy'"
        raise InvalidInputError(f"loss_fn: {loss_fn!r} is no name of a loss; {hint}")


def check_step(params: AdamParams) -> None:
    """Check those settings of a step that ruin the model if they are wrong.

    Raises:
        InvalidInputError: a setting is not finite, the learning rate is negative, or a beta is not from 0 to
            below 1.
    """
    for name in ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"):
        if not math.isfinite(value := getattr(params, name)):
            hint = "; 0 turns clipping off" if name == "grad_clip_norm" else ""
            raise InvalidInputError(f"optim_step: {name}: expected a finite number, got {value}{hint}")
    if params.learning_rate < 0:
        raise InvalidInputError(
            f"optim_step: learning_rate: expected 0 or more, got {params.learning_rate}; "
            "to go up a loss, change the sign of its weights or advantages"
        )
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(params, name) < 1:
            raise InvalidInputError(
                f"optim_step: {name}: expected 0 or more and less than 1, got {getattr(params, name)}"
            )


def check_saving(name: Any, ttl_seconds: int | None, call: str) -> None:
    """Check the name and the lifetime of a checkpoint.

    Raises:
        InvalidInputError: the name cannot be part of a path, or the lifetime is not positive.
    """
    if not isinstance(name, str) or not name or "/" in name:
        raise InvalidInputError(
            f"{call}: name: expected the last part of a path, without '/', such as 'step-3', got {name!r}"
        )
    if ttl_seconds is not None and ttl_seconds <= 0:
        raise InvalidInputError(
            f"{call}: ttl_seconds: expected 1 or more, or None to keep it, got {ttl_seconds}"
        )
