"""The JSON bodies of samples. Those of one client differ in prompt and number, which are spliced in.

Any thread may enter.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final

from tinker_sync.types._structured import field_names
from tinker_sync.types.model_input import EncodedTextChunk, ModelInput
from tinker_sync.types.sampling import SampleRequest, SamplingParams
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.adapt import json_body
from tinker_sync.wire.dialect import Dialect

# No text of the protocol holds it; a stop text that does is noticed.
_MARK: Final = 1_999_999_999
_MARKED: Final = b"[%d]" % _MARK
_PARAMS: Final = "sampling_params"
_key_of: Final = attrgetter(
    *(name for name in field_names(SampleRequest) if name not in ("prompt", _PARAMS, "seq_id")),
    *(f"{_PARAMS}.{name}" for name in field_names(SamplingParams) if name != "stop"),
)


class SampleBodies:
    """Writes the bodies of one client's samples. Thread-safe.

    >>> params = SamplingParams(max_tokens=4)
    >>> request = SampleRequest(prompt=ModelInput.from_ints([1, 2]), sampling_params=params)
    >>> bodies = SampleBodies(Dialect.of_vendor())
    >>> bodies.encode(request, 0) == bodies.encode(request, 0), bodies.encode(request, 7)[:12]
    (True, b'{"seq_id":7,')

    Args:
        dialect: what the server speaks.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        # The fields of the last request, and its text before and after the tokens; replaced as a whole.
        self._last: tuple[Any, bytes, bytes] = (None, b"", b"")

    def encode(self, request: SampleRequest, number: int) -> bytes:
        """Return the body of a request, which is fit for the server, under its number."""
        chunks = request.prompt.chunks
        if len(chunks) != 1 or type(chunks[0]) is not EncodedTextChunk or request.target_prompt_logprobs:
            return self._encode_whole(request, number)
        stop = request.sampling_params.stop
        key = _key_of(request), tuple(stop) if type(stop) is list else stop
        last: tuple[Any, bytes, bytes] | None = self._last
        if self._last[0] != key:
            last = self._learn(request, key)
        if last is None:
            return self._encode_whole(request, number)
        tokens = chunks[0].tokens
        listed = tokens if type(tokens) is list else _list(tokens)
        return b'{"seq_id":%d,%b%b%b' % (number, last[1], wire_json.DEFAULT.write(listed), last[2])

    def _learn(self, request: SampleRequest, key: Any) -> tuple[Any, bytes, bytes] | None:
        """Keep the text around the tokens of a request; None if it cannot be told from them."""
        marked = request.model_copy(update={"prompt": ModelInput.from_ints([_MARK])})
        before, *others = self._body(marked)[1:].split(_MARKED)
        if len(others) != 1:
            return None
        last = self._last = key, before, others[0]
        return last

    def _encode_whole(self, request: SampleRequest, number: int) -> bytes:
        return wire_json.with_number(self._body(request), number)

    def _body(self, request: SampleRequest) -> bytes:
        return json_body(request, self._dialect)


def _list(tokens: Any) -> list[int]:
    listed: list[int] = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    return listed
