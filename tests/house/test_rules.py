"""Every house rule finds a breach of it: a check that cannot fail proves nothing."""

from __future__ import annotations

import pytest

from house import rules
from house.rules import Source


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("spec/x.py", "import fleetune.planning.plan"),
        ("spec/x.py", "from fleetune import data"),
        ("data/x.py", "from fleetune.models.tokenizer import load_tokenizer"),
        ("data/x.py", "def f():\n    from fleetune.models import tokenizer"),
        ("data/x.py", "def f():\n    if True:\n        import fleetune.monitor.logs as logs"),
        ("launch/x.py", "from ..training import worker"),
        ("models/x.py", "from ..data import read"),
        ("parallel/x.py", "from fleetune.training.loop import train"),
        ("training/x.py", "import importlib\nimportlib.import_module('fleetune.cli.main')"),
        ("monitor/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fleetune.checkpoint import store"),
        ("stray.py", "from fleetune.spec import errors"),
    ],
)
def test_a_door_to_above_or_beside_is_found(name, text):
    assert rules.breaches_of_floors(Source(name, text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "training/x.py",
            "from fleetune.parallel import world\nfrom fleetune.models import build\nfrom fleetune.spec import errors",
        ),
        ("data/x.py", "from fleetune.data.rows import Row\nfrom . import packing"),
        ("__init__.py", "def f():\n    from fleetune.cli.run_object import train"),
    ],
)
def test_doors_down_and_within_a_room_are_open(name, text):
    assert rules.breaches_of_floors(Source(name, text)) == []


@pytest.mark.parametrize(
    "name", ["spec/x.py", "planning/x.py", "launch/x.py", "cli/x.py", "models/locate.py", "models/presets.py"]
)
@pytest.mark.parametrize("text", ["import torch", "def f():\n    from transformers import AutoConfig", "import torch.nn as nn"])
def test_torch_on_a_login_node_is_found(name, text):
    assert rules.breaches_of_weight(Source(name, text))
    assert not rules.breaches_of_weight(Source("training/x.py", text))


def test_torch_for_annotations_alone_is_no_weight():
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
    assert not rules.breaches_of_weight(Source("spec/x.py", text))


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from dill import loads",
        "import torch\ntorch.load('x')",
        "import torch\ntorch.save({}, 'x')",
        "import numpy as np\nnp.load('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "import yaml\nyaml.unsafe_load(text)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess\nsubprocess.run('ls', shell=choice)",
        "import os\nos.system('ls')",
        "eval('1')",
        "exec('x = 1')",
        "import torch.distributed as dist\ndist.all_gather_object(out, value)",
    ],
)
def test_code_in_data_is_found(text):
    assert rules.breaches_of_safety(Source("data/x.py", text))


def test_safe_ways_are_no_breach():
    text = (
        "import json, subprocess, yaml, numpy as np\nnp.load('x', allow_pickle=False)\nyaml.safe_load('a: 1')\n"
        "subprocess.run(['ls'], shell=False)\nmodel.eval()\nload('x').eval()\n"
    )
    assert rules.breaches_of_safety(Source("data/x.py", text)) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("data/utils.py", ""),
        ("helpers/x.py", ""),
        ("data/common/x.py", ""),
        ("garage/x.py", ""),
        ("data/x.py", "class RowManager: pass"),
        ("data/x.py", "class _BaseReader: pass"),
        ("data/x.py", "class ReaderMixin: pass"),
    ],
)
def test_leftover_names_are_found(name, text):
    assert rules.breaches_of_names(Source(name, text))
    assert rules.breaches_of_names(Source("data/baseline.py", "class Database: pass")) == []


def test_size_is_found():
    long_function = "def f():\n" + "    x = 1\n" * rules.MAX_FUNCTION_LINES
    assert rules.breaches_of_size(Source("data/x.py", long_function))
    assert rules.breaches_of_size(Source("data/x.py", "x = 1\n" * (rules.MAX_FILE_LINES + 1)))
    assert rules.breaches_of_size(Source("data/x.py", "def f(a, b, c, d, e, g, h): pass\n"))
    assert rules.breaches_of_size(Source("data/x.py", "class A:\n    def f(self, a, b, c, d, e, g, *, h, i): pass\n")) == []


def test_promises_are_found():
    assert rules.breaches_of_promises(Source("data/x.py", "x = 1  # TODO: more\n"))
    assert rules.breaches_of_promises(Source("data/x.py", "def f():\n    raise NotImplementedError\n"))
    assert rules.breaches_of_promises(Source("data/x.py", "def f():\n    raise NotImplementedError()\n"))


def test_mocks_and_switched_off_tests_are_found():
    assert rules.breaches_of_tests("t.py", "from unittest.mock import patch")
    assert rules.breaches_of_tests("t.py", "from unittest import mock")
    assert rules.breaches_of_tests("t.py", "import pytest\n@pytest.mark.xfail(reason='later')\ndef test(): pass")
