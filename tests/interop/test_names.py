"""Every public name of the reference client is offered under the same name, or listed as still to come."""

from __future__ import annotations

import inspect
import types as python_types

import tinker
import tinker.types

import tinker_sync
import tinker_sync.types

# Remove a name when it arrives.
LATER = {"LossHandle", "PerDatumLossFn", "RequestOptions"}


def test_the_package_offers_what_the_reference_offers() -> None:
    missing = set(tinker.__all__) - set(tinker_sync.__all__)
    assert missing == LATER


def test_types_offers_what_the_reference_offers() -> None:
    reference = {
        name
        for name, value in vars(tinker.types).items()
        if not name.startswith("_")
        and not isinstance(value, python_types.ModuleType)
        and name != "annotations"
    }
    assert len(reference) > 100
    assert reference - set(tinker_sync.types.__all__) == set()


def test_errors_descend_alike() -> None:
    for name in set(tinker.__all__) & set(tinker_sync.__all__):
        theirs, ours = getattr(tinker, name), getattr(tinker_sync, name)
        if inspect.isclass(theirs) and issubclass(theirs, Exception):
            named = {base.__name__ for base in theirs.__mro__}
            assert named <= {base.__name__ for base in ours.__mro__}, name
