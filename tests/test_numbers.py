from __future__ import annotations

from itertools import chain, islice

import pytest
from support.crowd import together

from tinker_sync._base import numbers


@pytest.mark.parametrize("atomic", [numbers._ATOMIC, False])
def test_each_thread_draws_other_numbers(monkeypatch: pytest.MonkeyPatch, atomic: bool) -> None:
    monkeypatch.setattr(numbers, "_ATOMIC", atomic)
    drawn, keys = numbers.numbers(3), numbers.unique_keys()
    together_drawn = together(*[lambda: list(zip(islice(drawn, 2000), keys, strict=False))] * 4)
    found = sorted(chain.from_iterable(together_drawn))
    assert [number for number, _ in found] == list(range(3, 8003))
    assert len({key for _, key in found}) == 8000
