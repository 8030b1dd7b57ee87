"""The heads of responses that carry a file: pauses that the server asks for, and checksums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tinker_sync._base.secret import HeaderMap
from tinker_sync.transport.files.response_head import TryAgain, find_checksum, read_head


def test_the_pause_that_the_server_asks_for_is_kept() -> None:
    busy: Any = SimpleNamespace(status=503, headers=HeaderMap({"Retry-After": "7"}))
    with pytest.raises(TryAgain) as caught:
        read_head(busy, 0, 10, 0.0, encoded=False)
    assert (caught.value.after_s, caught.value.refused) == (7.0, False)


@pytest.mark.parametrize(
    "header",
    [
        {"content-md5": "1B2M2Y8AsgTpgAmY7PhCfg=="},
        {"content-digest": "sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:"},
    ],
)
def test_a_checksum_of_the_body_is_not_one_of_the_file_if_the_body_is_a_part(header: dict[str, str]) -> None:
    assert find_checksum(header, whole=True) is not None
    assert find_checksum(header, whole=False) is None
