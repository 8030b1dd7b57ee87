"""Module paths from which scripts of the reference client import have the same objects as `tinker_sync`."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.each import for_each

import tinker_sync
import tinker_sync.lib
import tinker_sync.lib.public_interfaces
import tinker_sync.types
from tinker_sync.lib.wrapped_future import AwaitableConcurrentFuture

PACKAGES = [tinker_sync.lib, tinker_sync.lib.public_interfaces, tinker_sync.types]
PATHS = {
    f"{package.__name__}.{path}": package for package in PACKAGES for path in package._OTHER_PATHS.split()
}
ALIASES = {
    "AwaitableConcurrentFuture": AwaitableConcurrentFuture,
    "BackcompatSamplingClientFuture": tinker_sync.SamplingClient,
    "BackcompatTrainingClientFuture": tinker_sync.TrainingClient,
}


@for_each("path", PATHS)
def test_a_path_is_another_name_of_its_package(path: str) -> None:
    assert importlib.import_module(path) is PATHS[path]
    parent, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(parent), name) is PATHS[path]


def test_no_path_hides_a_module_of_the_package() -> None:
    folder = Path(tinker_sync.types.__file__).parent
    assert not {path.stem for path in folder.iterdir()} & set(tinker_sync.types._OTHER_PATHS.split())


@pytest.mark.parametrize("package", PACKAGES[:2], ids=lambda package: package.__name__)
def test_names_are_those_of_the_front_door(package: ModuleType) -> None:
    assert package.__all__
    for name in package.__all__:
        value = getattr(package, name)
        if name in ALIASES or hasattr(tinker_sync, name):
            assert value is ALIASES.get(name, getattr(tinker_sync, name, None))
        elif name != "is_retryable_status_code":
            assert "tinker.thinkingmachines.ai" in value(*("x",) * value.__code__.co_argcount)
    with pytest.raises(AttributeError, match="Nothing"):
        package.Nothing  # noqa: B018


def test_every_import_statement_finds_them() -> None:
    code = (
        "import tinker_sync.types.shared.untyped_api_future as module\n"
        "import tinker_sync.types.sample_response\n"
        "from tinker_sync.types.shared import untyped_api_future\n"
        "from tinker_sync.types.sampled_sequence import SampledSequence\n"
        "from tinker_sync.lib.public_interfaces.api_future import APIFuture, AwaitableConcurrentFuture\n"
        "from tinker_sync.lib.retry_handler import RetryConfig\n"
        "from tinker_sync.lib import api_future_impl, experimental\n"
        "print(module.UntypedAPIFuture.__name__, tinker_sync.types.sample_response.SampleResponse.__name__)"
    )
    assert run(code) == "UntypedAPIFuture SampleResponse\n"


def test_they_are_attributes_without_being_imported() -> None:
    code = (
        "import sys, tinker_sync as tinker\n"
        "print('tinker_sync.lib' in sys.modules)\n"
        "print(tinker.lib.public_interfaces.sampling_client.__name__, 'lib' in dir(tinker))\n"
        "print(tinker.lib.retry_handler.RetryConfig is tinker.RetryConfig)"
    )
    assert run(code) == "False\ntinker_sync.lib.public_interfaces True\nTrue\n"


def test_they_load_nothing_before_it_is_used() -> None:
    code = "import sys, tinker_sync.lib.public_interfaces; print({'numpy', 'requests'} & set(sys.modules))"
    assert run(code) == "set()\n"


def test_a_script_with_its_own_retries_finds_what_may_pass() -> None:
    from tinker_sync.lib.retry_handler import RetryConfig, is_retryable_status_code

    assert [is_retryable_status_code(status) for status in (400, 402, 404, 408, 409, 429, 500)] == [
        *(False, False, False, True, True, True, True)
    ]
    assert RetryConfig.retryable_exceptions == RetryConfig().retryable_exceptions
    assert (RetryConfig.max_connections, RetryConfig.max_attempts) == (1000, 10)
    caught = (*RetryConfig.retryable_exceptions, ConnectionError)
    passing = [tinker_sync.APITimeoutError(), tinker_sync.APIStatusError.from_reply(503, {}, b"")]
    passing += [tinker_sync.APIStatusError.from_reply(429, {}, b"")]
    lasting = [tinker_sync.InvalidInputError("x"), tinker_sync.APIStatusError.from_reply(400, {}, b"")]
    assert [isinstance(error, caught) for error in (*passing, *lasting)] == [True] * 3 + [False] * 2
    config = RetryConfig(4, max_attempts=2)
    assert (config.max_connections, config.attempts) == (4, 2)
    assert hash(config) == hash(RetryConfig(4, max_attempts=2))


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(Path(tinker_sync.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
