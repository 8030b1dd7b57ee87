"""Module paths from which scripts of the reference client import have the same objects as `tinker_sync`."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.tinker_stub import StubServer
from support.values import for_each

import tinker_sync
import tinker_sync.lib
import tinker_sync.lib.public_interfaces
import tinker_sync.types
from tinker_sync.lib.names import AwaitableConcurrentFuture
from tinker_sync.runtime.answers import merge_outputs

PACKAGES = [tinker_sync, tinker_sync.lib, tinker_sync.lib.public_interfaces, tinker_sync.types]
PATHS = {
    f"{package.__name__}.{path}": package for package in PACKAGES for path in package._OTHER_PATHS.split()
}
ALIASES = {
    "AwaitableConcurrentFuture": AwaitableConcurrentFuture,
    "BackcompatSamplingClientFuture": tinker_sync.SamplingClient,
    "BackcompatTrainingClientFuture": tinker_sync.TrainingClient,
    "_APIFuture": tinker_sync.APIFuture,
    "_TransportError": tinker_sync.APIConnectionError,
    "combine_fwd_bwd_output_results": merge_outputs,
}


@for_each("path", PATHS)
def test_a_path_is_another_name_of_its_package(path: str) -> None:
    assert importlib.import_module(path) is PATHS[path]
    parent, _, name = path.rpartition(".")
    assert getattr(importlib.import_module(parent), name) is PATHS[path]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_checkers_find_the_paths_which_hide_no_module(package: ModuleType) -> None:
    folder = Path(str(package.__file__)).parent
    paths = {path.replace(".", "/") for path in package._OTHER_PATHS.split()}
    assert not {path for path in paths if (folder / path).with_suffix(".py").exists()}
    stubs = {path.with_suffix("").relative_to(folder) for path in folder.rglob("*.pyi")}
    stubs = {path.parent if path.name == "__init__" else path for path in stubs}
    assert {Path(path) for path in paths} <= stubs


@pytest.mark.parametrize("package", PACKAGES[1:3], ids=lambda package: package.__name__)
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


@for_each(
    ("statement", "advice"),
    [
        ("from tinker_sync.lib.internal_client_holder import InternalClientHolder", "`holder`"),
        ("import tinker_sync.resources.weights", "RestClient"),
        ("from tinker_sync import proto", "tinker_sync.wire.proto"),
        ("from tinker_sync._base_client import BaseClient", "ServiceClient"),
        ("from tinker_sync.lib.api_future_impl import QueueStateObserver", "on_queue_state"),
        ("from tinker_sync import JournalError", "service.checkpoints"),
        ("from tinker_sync.journal.run import RunJournal", "service.checkpoints"),
    ],
)
def test_what_is_left_out_is_refused_with_what_to_use(statement: str, advice: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(statement)
    assert advice in str(caught.value)
    assert "tinker_sync has no '" in str(caught.value)


@for_each(
    ("kind", "name", "advice"),
    [
        ("ServiceClient", "attach", "service.checkpoints"),
        ("ServiceClient", "trainings", "service.checkpoints"),
        ("ServiceClient", "reconcile", "get_billing_usage"),
    ],
)
def test_what_the_class_of_a_client_has_no_more_says_what_to_use(kind: str, name: str, advice: str) -> None:
    client = getattr(tinker_sync, kind)
    with pytest.raises(AttributeError) as caught:
        getattr(client, name)
    assert f"tinker_sync has no '{kind}.{name}'" in str(caught.value)
    assert advice in str(caught.value)
    assert not hasattr(client, name)


@for_each(
    ("name", "advice"),
    [
        ("steps", "range(first, stop)"),
        ("unread", "service.checkpoints"),
        ("settled", "service.checkpoints"),
    ],
)
def test_what_a_training_client_has_no_more_says_what_to_use(name: str, advice: str) -> None:
    with StubServer() as stub, tinker_sync.ServiceClient(base_url=stub.url, api_key="tml-x") as service:
        training = service.create_lora_training_client("stub-base")
        with pytest.raises(AttributeError, match=re.escape(f"no 'TrainingClient.{name}': ")) as caught:
            getattr(training, name)
    assert advice in str(caught.value)


def test_an_argument_of_an_earlier_version_says_what_to_use() -> None:
    arguments: Any = {"base_url": "http://127.0.0.1:1", "api_key": "tml-x", "journal": "run.journal"}
    with pytest.raises(TypeError, match=r"'journal'.*service.checkpoints"):
        tinker_sync.ServiceClient(**arguments)
    with pytest.raises(AttributeError, match=r"has no 'JournalError': service.checkpoints"):
        getattr(tinker_sync, "JournalError")  # noqa: B009  # type checkers know that it is not there
    with pytest.raises(AttributeError, match=r"has no 'errors.JournalError': service.checkpoints"):
        getattr(tinker_sync.errors, "JournalError")  # noqa: B009


def test_other_unknown_names_fail_as_usual() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'tinker_sync\.nothing'"):
        importlib.import_module("tinker_sync.nothing")
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec("from tinker_sync.lib import Nothing")
    assert importlib.util.find_spec("tinker_sync.nothing") is None


def test_without_ray_its_module_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "import tinker_sync\n"
        "try:\n    import tinker_sync.ray\n"
        "except tinker_sync.MissingExtraError as error:\n    print(error.extra, error)"
    )
    assert run(code) == "ray tinker_sync.ray needs a package that is not installed: pip install 'ray[data]'\n"


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
