"""Lazy packages: every public name is listed, and the module that defines it loads on first use.

Tests run code in a new interpreter if they depend on the modules that are loaded.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from support.tinker_stub import StubServer

import tinker_sync
import tinker_sync.types

PACKAGES = ["tinker_sync", "tinker_sync.testing", "tinker_sync.types"]
DOORS = [
    *PACKAGES,
    "tinker_sync.lib",
    "tinker_sync.lib.public_interfaces",
    "tinker_sync.losses",
    "tinker_sync.insight",
]
HEAVY = {"numpy", "requests", "urllib3", "tokenizers", "cattrs", "orjson", "torch", "asyncio"}


def fresh(code: str, *arguments: str, given: bytes = b"") -> str:
    """Return the output of `code` in a new interpreter."""
    root = str(Path(tinker_sync.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        input=given,
        env=os.environ | {"PYTHONPATH": root},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def checked_names(package: str) -> dict[str, list[str]]:
    """Return the names in a package's stub, which type checkers read, by the module that defines them.

    Modules of the package that exist for scripts of the reference client alone are left out.
    """
    others = getattr(importlib.import_module(package), "_OTHER_PATHS", "").split()
    stub = Path(str(importlib.import_module(package).__file__)).with_suffix(".pyi")
    found: dict[str, list[str]] = {}
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        assert isinstance(node, ast.ImportFrom)
        assert all(alias.asname == alias.name for alias in node.names), "a stub offers only what it renames"
        names = [alias.name for alias in node.names if node.module != package or alias.name not in others]
        found.setdefault(str(node.module), []).extend(names)
    return {module: names for module, names in found.items() if names}


def public_names(module: Path) -> set[str]:
    """Return the names in `__all__` of a module, or without `__all__` its public classes and type aliases."""
    names: set[str] = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_") and not name.isupper()}


@pytest.mark.parametrize("package", DOORS)
def test_checkers_find_the_names_that_there_are(package: str) -> None:
    module = importlib.import_module(package)
    checked = checked_names(package)
    assert module.__all__ == sorted(name for names in checked.values() for name in names)
    for home, names in checked.items():
        for name in names:
            assert getattr(module, name) is getattr(importlib.import_module(home), name)


def test_every_package_with_a_table_is_checked() -> None:
    root = Path(tinker_sync.__file__).parent
    tables = {path.parent for path in root.rglob("__init__.py") if "\n_HOMES = {" in path.read_text("utf-8")}
    assert {".".join(("tinker_sync", *path.relative_to(root).parts)) for path in tables} == set(DOORS)


def test_every_type_is_exported_from_the_module_that_defines_it() -> None:
    folder = Path(tinker_sync.types.__file__).parent
    defined = {
        f"tinker_sync.types.{path.stem}": public_names(path)
        for path in folder.glob("*.py")
        if not path.stem.startswith("_")
    }
    table = {home: set(names) for home, names in checked_names("tinker_sync.types").items()}
    # This enum is defined with the errors, which have it as an attribute.
    assert table.pop("tinker_sync.errors") == {"RequestErrorCategory"}
    assert table == {home: names for home, names in defined.items() if names}


def test_every_error_is_offered() -> None:
    from tinker_sync import errors

    assert set(checked_names("tinker_sync")["tinker_sync.errors"]) == set(errors.__all__)
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException) and not name.startswith("_")
    }
    assert classes <= set(errors.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_resolves_once(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        value = getattr(module, name)
        assert vars(module)[name] is value
        assert getattr(module, name) is value


def test_import_loads_nothing_else() -> None:
    new = fresh("import sys; before = {*sys.modules}; import tinker_sync; print(*{*sys.modules} - before)")
    names = set(new.split())
    assert {name for name in names if name.partition(".")[0] not in sys.stdlib_module_names} == {
        "tinker_sync",
        "tinker_sync._exceptions",  # another name of the package
        # Former names of modules, without the modules.
        *(
            "tinker_sync.diagnose",
            "tinker_sync.display",
            "tinker_sync.text",
            "tinker_sync.transfer",
            "tinker_sync.usage",
        ),
        "tinker_sync._base",
        "tinker_sync._base.lazy",
    }
    assert not names & HEAVY


@pytest.mark.parametrize(
    "use",
    [
        "tinker_sync.AdamParams(learning_rate=1e-4)",
        "tinker_sync.DimuonParams(learning_rate=1e-3)",
        "tinker_sync.LoraConfig(rank=8)",
        "tinker_sync.RateLimitError",
        "tinker_sync.Timeout()",
        "tinker_sync.types",
    ],
)
def test_names_that_need_no_arrays_and_no_network_load_neither(use: str) -> None:
    loaded = set(fresh(f"import sys, tinker_sync; {use}; print(*sys.modules)").split())
    assert loaded & HEAVY == set()


@pytest.mark.parametrize("client", ["RestClient", "AdminClient", "SamplingClient", "ServiceClient"])
def test_clients_load_what_their_calls_need_with_the_calls(client: str) -> None:
    loaded = set(fresh(f"import sys, tinker_sync; tinker_sync.{client}; print(*sys.modules)").split())
    assert not loaded & (HEAVY - {"orjson"})


FIRST_SAMPLE = """
import sys, tinker_sync
service = tinker_sync.ServiceClient(base_url={url!r}, api_key="tml-key")
sampler = service.create_sampling_client(base_model="stub/model").result()
prompt = tinker_sync.ModelInput.from_ints([1, 2, 3])
result = sampler.sample(prompt, 1, tinker_sync.SamplingParams(max_tokens=4)).result()
[sequence] = result.sequences
print(len(sequence.tokens), sequence.length, len(sequence.logprobs))
loaded = [*sys.modules]
print(sequence.tokens_np.dtype, sequence.logprobs_np.dtype, sequence.tokens_np.tolist() == sequence.tokens)
service.close().result()
print(*loaded)
"""


def test_a_first_sample_of_lists_loads_no_arrays_and_no_requests() -> None:
    with StubServer() as stub:
        counts, views, loaded = fresh(FIRST_SAMPLE.format(url=stub.url)).splitlines()
    assert (counts, views) == ("4 4 4", "int32 float32 True")
    names = set(loaded.split())
    assert not names & (HEAVY - {"orjson"})
    ours = {name for name in names if name.startswith("tinker_sync.")}
    unused = ("clients.rest", "clients.training", "transport.files", "losses.", "data", "local")
    assert not {name for name in ours if name.removeprefix("tinker_sync.").startswith(unused)}


# One interpreter for each package, in which a star import loads the names first.
EVERY_NAME = """
import json, pickle, sys
package, pickled = sys.argv[1], sys.stdin.buffer.read()
stars = {}
exec(f"from {package} import *", stars)
classes = pickle.loads(pickled)
import copy, importlib, inspect, pydoc
module = importlib.import_module(package)
print(json.dumps({
    "star": list(stars),
    "help": pydoc.render_doc(module, renderer=pydoc.plaintext),
    "members": list(dict(inspect.getmembers(module))),
    "classes": all(getattr(module, n) == c == copy.deepcopy(c) for n, c in classes.items()),
}))
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_star_import_help_members_and_pickles_have_every_name(package: str) -> None:
    names = importlib.import_module(package).__all__
    classes = {name: getattr(importlib.import_module(package), name) for name in names}
    classes = {name: value for name, value in classes.items() if inspect.isclass(value)}
    assert classes
    found = json.loads(fresh(EVERY_NAME, package, given=pickle.dumps(classes)))
    assert set(names) <= set(found["star"])
    contents = {word.strip("|,()=").partition("(")[0] for word in found["help"].split()}
    own = {name for name in names if not name.startswith("__")}
    assert own - {"errors", "types"} <= contents | {word.rpartition(".")[2] for word in contents}
    assert set(names) <= set(found["members"])
    assert found["classes"]


@pytest.mark.parametrize("package", PACKAGES)
def test_dir_lists_every_name_and_loads_none(package: str) -> None:
    code = f"import sys, {package} as m; print(*dir(m)); print(*sys.modules)"
    listed, loaded = (set(line.split()) for line in fresh(code).splitlines())
    assert set(importlib.import_module(package).__all__) <= listed
    assert not loaded & HEAVY


@pytest.mark.parametrize(
    "path",
    [
        "tinker_sync.types",
        "tinker_sync.errors",
        "tinker_sync.config",
        "tinker_sync.types.tensor_data",
        "tinker_sync.types.datum",
    ],
)
def test_modules_are_attributes_without_being_imported(path: str) -> None:
    assert fresh(f"import tinker_sync; print({path}.__name__)").strip() == path


def test_first_use_from_many_threads_gives_one_class() -> None:
    code = """
import threading, tinker_sync
from concurrent.futures import ThreadPoolExecutor
gate = threading.Barrier(8)
def use(_):
    gate.wait(120)
    return tinker_sync.Datum
with ThreadPoolExecutor(8) as pool:
    print(len(set(pool.map(use, range(8)))))
"""
    assert fresh(code).strip() == "1"


@pytest.mark.parametrize(
    ("package", "wrong", "right"),
    [
        ("tinker_sync", "AdamParms", "AdamParams"),
        ("tinker_sync", "datum", "Datum"),
        ("tinker_sync", "type", "types"),
        ("tinker_sync.types", "SamplingParam", "SamplingParams"),
        ("tinker_sync.types", "tensordata", "tensor_data"),
    ],
)
def test_a_mistyped_name_is_an_attribute_error_with_the_right_one(
    package: str, wrong: str, right: str
) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{wrong}', did you mean '{right}'") as caught:
        getattr(importlib.import_module(package), wrong)
    assert caught.value.name == wrong


def test_a_module_keeps_its_former_name() -> None:
    fresh(
        "import sys, tinker_sync.usage; assert 'tinker_sync.insight' not in sys.modules; "
        "from tinker_sync.usage import PriceTable; from tinker_sync.insight import PriceTable as the_same; "
        "assert PriceTable is the_same is tinker_sync.usage.PriceTable; "
        "from tinker_sync.display import shade; assert shade is tinker_sync.insight.shade"
    )


def test_a_module_of_a_moved_package_is_the_same_module() -> None:
    """A second copy would have classes of its own, which no `except` and no `isinstance` knows."""
    fresh(
        "import tinker_sync; from tinker_sync.transfer.download import CheckpointDownload as one; "
        "assert one is tinker_sync.CheckpointDownload; import tinker_sync.usage.budget as budget; "
        "assert budget.Budget is tinker_sync.usage.Budget and budget.__spec__.name == budget.__name__"
    )
    with pytest.raises(
        ModuleNotFoundError, match=r"No module named 'tinker_sync\.transport\.files\.nothing'"
    ):
        importlib.import_module("tinker_sync.transfer.nothing")


# ----- The engine imports no network, and the client does not import the engine
def loaded_after(code: str) -> set[str]:
    """Run code in a new interpreter, and return the loaded modules."""
    return set(fresh(f"{code}; import sys; print(*sys.modules)").split())


def test_the_client_does_not_load_the_engine() -> None:
    loaded = loaded_after("import tinker_sync; tinker_sync.ServiceClient, tinker_sync.types.Datum")
    assert "tinker_sync.clients.service" in loaded
    assert not [name for name in loaded if name.startswith("tinker_sync.local")]


def test_the_engine_loads_no_network() -> None:
    loaded = loaded_after("from tinker_sync.local.engine import model, sampling, training")
    assert "numpy" in loaded
    assert not loaded & {"requests", "urllib3", "tokenizers", "safetensors", "asyncio", "torch"}
    ours = {name.split(".")[1] for name in loaded if name.startswith("tinker_sync.")}
    assert not ours & {"clients", "config", "errors", "runtime", "transport", "types", "wire"}


FORKED_DURING_AN_IMPORT = """
import importlib.abc, importlib.util, os, signal, sys, threading, warnings
from tinker_sync import ServiceClient

warnings.simplefilter("ignore")  # of threads and forks

began, go_on = threading.Event(), threading.Event()

class Slow(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "tinker_sync.slow" else None
    def exec_module(self, module):
        began.set()
        go_on.wait()

sys.meta_path.insert(0, Slow())
threading.Thread(target=importlib.import_module, args=("tinker_sync.slow",)).start()
began.wait()
os.register_at_fork(before=go_on.set)  # comes before the functions that the package has registered
child = os.fork()
if child == 0:
    signal.alarm(20)
    importlib.import_module("tinker_sync.slow")
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_that_was_forked_during_an_import_of_another_thread_imports_the_module() -> None:
    assert fresh(FORKED_DURING_AN_IMPORT).split() == ["0"]
