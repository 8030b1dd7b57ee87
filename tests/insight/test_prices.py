"""Price tables from files, costs, and errors in tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tinker_sync.errors import ConfigurationError
from tinker_sync.insight import PriceTable, TokenCounts, Usage


def test_defaults_without_a_file() -> None:
    table = PriceTable.load()
    assert table.path == Path.home() / ".tinker" / "prices.json"
    every = TokenCounts(trained=1, prompt=1, cached=1, sampled=1)
    assert table.price("Qwen/Qwen3-8B").missing(every) == ("trained", "prompt", "cached", "sampled")
    assert table.price("tinker-sync/tiny").of(every) == 0
    assert table.price(None).of(TokenCounts()) == 0


def test_default_file_and_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Path.home() / ".tinker" / "prices.json"
    usual.parent.mkdir()
    usual.write_text('{"models": {"org/*": {"trained": 3}, "tinker-sync/tiny": {"trained": 1}}}')
    assert PriceTable.load().price("org/base").trained == 3.0
    assert PriceTable.load().price("tinker-sync/tiny").trained == 1.0
    other = tmp_path / "other.json"
    other.write_text('{"models": {"*": {"sampled": null, "prompt": 0.5}}}')
    monkeypatch.setenv("TINKER_PRICES", str(other))
    assert PriceTable.load().price("org/base").prompt == 0.5
    assert PriceTable.load().price("org/base").sampled is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", 'has no object "models"'),
        ('{"models": []}', 'has no object "models"'),
        ('{"models": {"a": 1}}', r"models\['a'\] is not an object"),
        ('{"models": {"a": {"train": 1}}}', "has 'train'; expected trained, prompt, cached, sampled"),
        ('{"models": {"a": {"trained": "1"}}}', "is not a price: '1'"),
        ('{"models": {"a": {"trained": -1}}}', "is not a price: -1"),
        ('{"models": {"a": {"trained": true}}}', "is not a price: True"),
        ('{"models": {"a": {"trained": NaN}}}', "is not a price: nan"),
    ],
)
def test_invalid_tables_are_explained(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "prices.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=words) as caught:
        PriceTable.load(path)
    assert str(path) in str(caught.value)


def test_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        PriceTable.load(tmp_path / "none.json")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        PriceTable.load(tmp_path)


def test_cost_with_an_unknown_price() -> None:
    table = PriceTable.of({"a": {"trained": 2.0}})
    usage = Usage.of({"a": TokenCounts(trained=500_000), "b": TokenCounts(sampled=1)}, table)
    assert (usage.cost_usd, usage.known_cost_usd) == (None, 1.0)
    assert Usage.of({"a": TokenCounts(trained=500_000)}, table).cost_usd == 1.0
    assert Usage.of({}, table).cost_usd == 0
