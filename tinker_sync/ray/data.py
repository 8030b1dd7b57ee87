"""`Sampler`: a map stage of Ray Data."""

from __future__ import annotations

import hashlib
import os
import uuid
import weakref
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from tinker_sync.batch.item import decode_all
from tinker_sync.batch.results import ResultsFile
from tinker_sync.batch.samples import Order, Window, map_samples
from tinker_sync.errors import InvalidInputError, TinkerError
from tinker_sync.ray.sharing import share_limits

if TYPE_CHECKING:
    from tinker_sync.batch.item import BatchItem
    from tinker_sync.clients.sampling import SamplingClient
    from tinker_sync.types import SampleResponse, SamplingParams


class Sampler:
    """A sampler of the prompts of a data set, batch by batch; a class for ``map_batches``.

        dataset.map_batches(
            tinker_sync.ray.Sampler,
            fn_constructor_kwargs={"sampling": sampling, "params": types.SamplingParams(max_tokens=64)},
            compute=ray.data.ActorPoolStrategy(size=8),
            batch_size=1024,
        )

    Before Ray 2.51, give ``concurrency=8`` in place of `compute`. Later versions warn of `concurrency`.

    It adds the columns `tokens`, `logprobs`, `stop_reasons` (a list for each row, with an entry for each
    sequence), `texts` if the prompts are text or a tokenizer is given, and `error`: None, or the reason
    why the row has no samples. Ray Data limits the number of batches under way. A batch ends with its slowest
    sample, so it should have several times `max_in_flight` rows.

    With `save_to` each process writes its responses to its own file in that directory. A new run of the same
    data set finds them by the column `key`, and samples only the other rows.

    Args:
        sampling: the client to copy.
        params: length, temperature, stops and so on.
        num_samples: the number of continuations of each prompt.
        prompt: the column of the prompts: texts, or lists of token ids.
        key: the column that names a row, for `save_to`.
        save_to: a directory for the responses.
        max_in_flight: the most prompts of one process under way at once.
        tokenizer: encodes texts and decodes for `texts`; None loads the model's own with the first text.
        options: further arguments of `SamplingClient.sample`.

    Raises:
        InvalidInputError: `save_to` is given without `key`, or its ``part-*.jsonl`` is no file of results.
        ConfigurationError: Ray was not started in this process.
    """

    def __init__(
        self,
        sampling: SamplingClient,
        params: SamplingParams,
        num_samples: int = 1,
        *,
        prompt: str = "prompt",
        key: str | None = None,
        save_to: str | os.PathLike[str] | None = None,
        max_in_flight: int = 256,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        if save_to is not None and key is None:
            raise InvalidInputError("Sampler: save_to needs key=, the column that names a row")
        self._prompt, self._key = prompt, key
        self._shared = share_limits(sampling)
        self._order = Order(sampling, params, num_samples, options, tokenizer)
        self._window = Window(max_in_flight, ordered=False, on_error="return")
        self._saved = None if save_to is None else SavedRows(Path(save_to))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Sample the prompts of a batch, and return the batch with the columns of the samples.

        Raises:
            InvalidInputError: a column is missing, or `save_to` has a response for a row that was sampled
                from another prompt or with other parameters.
            TinkerError: the server or the client takes no further sample, for example because of a wrong key.
        """
        for name in filter(None, (self._prompt, self._key)):
            if name not in batch:
                raise InvalidInputError(f"Sampler: the data set has no column {name!r}; it has {list(batch)}")
        prompts = [_plain(each) for each in batch[self._prompt]]
        if self._saved is None or self._key is None:
            asked = [_Asked(prompt) for prompt in prompts]
        else:
            asked = self._look_up(self._saved, batch[self._key], prompts)
        missing = [place for place, each in enumerate(asked) if each.saved is None]
        rows = [
            {} if each.saved is None else self._row(prompts[place], each.saved, None)
            for place, each in enumerate(asked)
        ]
        for item in self._sample([asked[place].prompt for place in missing]):
            place = missing[item.index]
            if self._saved is not None and item.response is not None:
                self._saved.add(asked[place].name, asked[place].key, item.response)
            rows[place] = self._row(prompts[place], item.response, item.error)
        self._shared.report_usage()
        return {**batch, **_columns(rows)}

    def _sample(self, prompts: list[Any]) -> Generator[BatchItem, None, None]:
        return map_samples(prompts, self._order, self._window, save_to=None, progress=False, total=None)

    def _look_up(self, saved: SavedRows, names: Iterable[Any], prompts: list[Any]) -> list[_Asked]:
        """Return each prompt as an `_Asked`, with the response of an earlier run if there is one."""
        asked = []
        for name, prompt in zip(map(_plain, names), prompts, strict=True):
            try:
                model_input = self._order.model_input(prompt)
                key = self._order.key(model_input)
            except (TinkerError, TypeError, ValueError):
                asked.append(_Asked(prompt))  # the sample fails with this error, and the row has it
            else:
                asked.append(_Asked(model_input, name, key, saved.find(name, key)))
        return asked

    def _row(self, prompt: Any, response: SampleResponse | None, error: Exception | None) -> dict[str, Any]:
        sequences = [] if response is None else response.sequences
        row: dict[str, Any] = {
            "tokens": [each.tokens for each in sequences],
            "logprobs": [each.logprobs or [] for each in sequences],
            "stop_reasons": [str(each.stop_reason) for each in sequences],
            "error": None if error is None else f"{type(error).__name__}: {error}",
        }
        if isinstance(prompt, str) or self._order.tokenizer is not None:
            row["texts"] = [] if response is None else decode_all(self._order.tokenizer, response)
        return row


@frozen
class _Asked:
    """The prompt of a row. With `save_to` also the fields that find the response of an earlier run.

    `name` is the name of the row, from the column that `Sampler` got as `key`. `key` is a hash of the prompt
    and the parameters. `saved` is the response, or None.
    """

    prompt: Any
    name: Any = None
    key: str = ""
    saved: SampleResponse | None = None


class SavedRows:
    """The responses that this process saves in a file of its own, and those in the files of other processes.

    The file is created with the first response, and is closed when this object is no longer used.

    Args:
        directory: holds a file for each process of each run. This object reads those that exist already.

    Raises:
        InvalidInputError: a file ``part-*.jsonl`` there is not a file of results.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._earlier = [ResultsFile(path, writable=False) for path in sorted(directory.glob("part-*.jsonl"))]
        for file in self._earlier:
            file.close()  # `find` opens it again
        self._own: ResultsFile | None = None

    def find(self, name: Any, key: str) -> SampleResponse | None:
        """Return the response for a row from the files that existed when this object was made, or None.

        Raises:
            ForeignResultError: the row has a response for another prompt or other parameters.
        """
        position = _position_of(name)
        return next((found for file in self._earlier if (found := file.find(position, key))), None)

    def add(self, name: Any, key: str, response: SampleResponse) -> None:
        """Append the response for a row to the file of this process."""
        if self._own is None:
            self._own = ResultsFile(self._directory / f"part-{uuid.uuid4().hex}.jsonl")
            weakref.finalize(self, self._own.close)
        self._own.hold()
        self._own.add(_position_of(name), key, response, {"row": name})


def _position_of(name: Any) -> int:
    """Return a number for the name of a row. Two rows of a data set hardly ever get the same number.

    >>> _position_of("a") == _position_of("a") != _position_of("b")
    True
    """
    return int.from_bytes(hashlib.sha256(repr(name).encode()).digest()[:7], "big")


def _plain(value: Any) -> Any:
    """Convert a numpy scalar or array to plain values. Other values stay as they are."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in rows[0] if rows else ():
        columns[name] = column = np.empty(len(rows), dtype=object)
        column[:] = [row[name] for row in rows]
    return columns
