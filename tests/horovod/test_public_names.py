"""Each public name of horovod.torch is here, with the same arguments and defaults."""

import inspect
import json
from pathlib import Path

import pytest

import mpiddp.horovod as hvd

pytestmark = [pytest.mark.once, pytest.mark.timeout(30)]

# Names, parameters and defaults of horovod.torch 0.28.1; null: no function or class to call.
TABLE = json.loads(Path(__file__).with_name("public_names.json").read_text())
# What other modules of it export, and programs use through horovod.torch.
NAMED_DEFAULTS = {
    "Average": hvd.Average,
    "Compression.none": hvd.Compression.none,
    "global_process_set": hvd.global_process_set,
}


@pytest.mark.essential
def test_no_name_is_missing():
    assert sorted(TABLE.keys() - set(dir(hvd))) == []
    assert sorted(TABLE.keys() - set(hvd.__all__)) == []


@pytest.mark.parametrize("name", [name for name in TABLE if TABLE[name] is not None])
def test_arguments(name):
    found = []
    for parameter in inspect.signature(getattr(hvd, name)).parameters.values():
        if parameter.default is inspect.Parameter.empty:
            found.append([parameter.name])
        else:
            found.append([parameter.name, parameter.default])
    expected = [
        [
            each[0],
            *(NAMED_DEFAULTS[text] if text in NAMED_DEFAULTS else eval(text) for text in each[1:]),
        ]
        for each in TABLE[name]
    ]
    # What ours takes besides comes last, and can be left out.
    assert found[: len(expected)] == expected
    assert all(len(extra) == 2 for extra in found[len(expected) :])


def test_the_numbers_of_the_reductions():
    numbers = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert [int(op) for op in numbers] == [0, 1, 2, 3, 4, 5]
