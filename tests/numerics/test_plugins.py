"""Plug-ins: each taken as a whole or refused by name, in whatever way it is broken."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path

import pytest

from pagedctl.errors import ConfigError
from pagedctl.numerics.plugins import ENTRY_POINTS, Installed, discover
from tests.conftest import ROOT

SOUND = """
from pagedctl.plugins import (
    BATCH_INVARIANT, Capability, Choices, Envelope, LeafSpec, OrderTemplate, Plugin, formats,
)

def resolve(choices: Choices) -> None:
    choices.tighten("logprob_basis", "raw")

ACME = Envelope(name="acme", bitwise=True, promise="acme's", resolve=resolve)
LEAF = LeafSpec(
    name="acme.block_sumexp",
    op="block_sumexp",
    entry="acme_plugin:build",
    formats=formats("x", dtypes=("float32",)),
    capability=Capability(kind="cpu"),
    order=OrderTemplate(op="block_sumexp", device_class="cpu", terms=(("sum", "acme's"),)),
    features=frozenset({BATCH_INVARIANT}),
    priority=10,
)
plugin = Plugin(envelopes=(ACME,), leaves=(LEAF,))
"""

BROKEN = {
    # what is added to a sound module, and what the refusal says
    "a contract's name is taken": (
        'plugin = Plugin(envelopes=(ACME, Envelope(name="fast", bitwise=False, promise="", '
        "resolve=resolve)), leaves=(LEAF,))",
        "ValueError: contract fast is registered twice",
    ),
    "a contract has another tool's name": (
        'plugin = Plugin(envelopes=(Envelope(name="auto", bitwise=False, promise="", '
        "resolve=resolve),))",
        "ValueError: auto is another tool's name for fast",
    ),
    "a leaf's name is taken": (
        "from dataclasses import replace\nplugin = Plugin(envelopes=(ACME,), leaves=("
        'replace(LEAF, name="torch.block_sumexp"),))',
        "ValueError: leaf torch.block_sumexp is registered twice",
    ),
    "a leaf has an unusable name": (
        'from dataclasses import replace\nplugin = Plugin(leaves=(replace(LEAF, name="a b"),))',
        "ValueError: 'a b' cannot name a leaf: letters, digits, - _ and .",
    ),
    "a contract has a name of two words": (
        'Envelope(name="two words", bitwise=True, promise="", resolve=resolve)',
        "ValueError: 'two words' cannot name a contract: letters, digits, - _ and .",
    ),
    "a contract has no name": (
        'Envelope(name="", bitwise=True, promise="", resolve=resolve)',
        "ValueError: '' cannot name a contract: letters, digits, - _ and .",
    ),
    "a leaf is of an op that is none": (
        "from dataclasses import replace\nplugin = Plugin(leaves=(replace(LEAF, op='blok_sumexp', "
        "order=replace(LEAF.order, op='blok_sumexp')),))",
        "ValueError: leaf acme.block_sumexp is of op blok_sumexp, which no model has; did you mean "
        "block_sumexp?",
    ),
    "a leaf's entry is in no module": (
        "from dataclasses import replace\nplugin = Plugin(leaves=("
        'replace(LEAF, entry="acme_of_another_version:build"),))',
        "ValueError: leaf acme.block_sumexp: there is no entry 'acme_of_another_version:build'",
    ),
    "a leaf's entry has no function": (
        "from dataclasses import replace\nplugin = Plugin(leaves=("
        'replace(LEAF, entry="acme_plugin"),))',
        "ValueError: leaf acme.block_sumexp: there is no entry 'acme_plugin'",
    ),
    "a contract is a word": (
        'plugin = Plugin(envelopes=("acme",))',
        "TypeError: envelopes of a Plugin is a tuple of Envelope, not ('acme',)",
    ),
    "the leaves are a list": (
        "plugin = Plugin(leaves=[LEAF])",
        "TypeError: leaves of a Plugin is a tuple of LeafSpec, not [LeafSpec(",
    ),
    "a contract is of another class": (
        "class Loose(Envelope):\n    def settle(self, choices): pass\n"
        'plugin = Plugin(envelopes=(Loose(name="loose", bitwise=True, promise="", '
        "resolve=resolve),))",
        "TypeError: envelopes of a Plugin is a tuple of Envelope, not (Loose(",
    ),
    "a contract needs no evidence": (
        'Envelope(name="more", bitwise=True, promise="", resolve=resolve, evidence=())',
        "ValueError: contract more: evidence is invariance, and may be more of invariance, align",
    ),
    "a leaf's fields have other types": (
        "from dataclasses import replace\nfrom pagedctl.plugins import Limit\n"
        "plugin = Plugin(leaves=(replace(LEAF, priority='high', features=['batch_invariant'], "
        "formats=('x',), limits=(Limit(fact='block_size', minimum=1.5),), traits=(('a',),)),))",
        "TypeError: LeafSpec: formats[0] is 'x', not Format; limits[0].minimum is 1.5; "
        "features is ['batch_invariant'], not a frozenset; traits[0] is ('a',), not 2 items; "
        "priority is 'high', not int",
    ),
    "a leaf's priority is True": (
        "from dataclasses import replace\nplugin = Plugin(leaves=(replace(LEAF, priority=True),))",
        "TypeError: LeafSpec: priority is True, not int",
    ),
    "the entry point is no plug-in": (
        'plugin = {"envelopes": (ACME,)}',
        "TypeError: acme_plugin:plugin gives dict, not Plugin",
    ),
    "the function gives nothing": (
        "def plugin(): return None",
        "TypeError: acme_plugin:plugin gives NoneType, not Plugin",
    ),
    "the name is not in the module": (
        "del plugin",
        "AttributeError: module 'acme_plugin' has no attribute 'plugin'",
    ),
    "an import fails": (
        "import acme_of_another_version",
        "ModuleNotFoundError: No module named 'acme_of_another_version'",
    ),
    "the module leaves the process": ("raise SystemExit(3)", "SystemExit: 3"),
    "a resolver names no switch": (
        "def resolve_more(choices): choices.tighten('batch_invariance', True)\n"
        'plugin = Plugin(envelopes=(Envelope(name="more", bitwise=True, promise="", '
        "resolve=resolve_more),))",
        "KeyError: no switch is called batch_invariance",
    ),
    "a resolver loosens what bitwise means": (
        "def loosen(choices): choices.tighten('batch_invariant', False)\n"
        'plugin = Plugin(envelopes=(ACME, Envelope(name="loose", bitwise=True, promise="", '
        "resolve=loosen)), leaves=(LEAF,))",
        "ValueError: the contract loose loosens batch_invariant to off: it already needs "
        "batch_invariant on, and a contract only tightens",
    ),
    "a circular import": (
        "from pagedctl.config.groups import ContractOptions",
        "ImportError: cannot import name 'ContractOptions' from partially initialized module "
        "'pagedctl.config.groups'",
    ),
}


def point(value: str = "acme_plugin:plugin", name: str = "acme") -> EntryPoint:
    return EntryPoint(name=name, value=value, group=ENTRY_POINTS)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of modules that can be imported, and are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("acme_plugin", "other_plugin"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def nothing_taken(found: Installed) -> bool:
    house = discover([])
    same_leaves = found.leaves.leaves() == house.leaves.leaves()
    return found.envelopes.names() == house.envelopes.names() and same_leaves


@pytest.mark.parametrize("as_function", [False, True])
def test_a_sound_plug_in_adds_its_contracts_and_leaves(modules: Path, as_function: bool) -> None:
    source = SOUND + ("\ndef make(): return plugin\n" if as_function else "")
    (modules / "acme_plugin.py").write_text(source)
    found = discover([point("acme_plugin:make" if as_function else "acme_plugin:plugin")])
    assert (found.plugins, found.faults) == (("acme",), ())
    assert found.envelopes.names() == ("fast", "invariant", "rl-bitwise", "acme")
    assert found.envelopes.bitwise_names()[-1] == "acme"
    names = [leaf.name for leaf in found.leaves.leaves("block_sumexp")]
    assert names == ["acme.block_sumexp", "torch.block_sumexp", "triton.block_sumexp"]
    assert found.require_sound() is found
    assert found.contract_remedy() is None


@pytest.mark.parametrize("case", [case for case in BROKEN if case != "a circular import"])
def test_a_broken_plug_in_is_refused_by_name_and_leaves_nothing(modules: Path, case: str) -> None:
    added, problem = BROKEN[case]
    (modules / "acme_plugin.py").write_text(f"{SOUND}\n{added}\n")
    found = discover([point()])
    assert nothing_taken(found)
    assert found.plugins == ()
    (fault,) = found.faults
    assert fault.what.startswith(f"plug-in acme cannot be loaded: {problem}")
    assert fault.lines()[1:] == [
        "where: entry point acme_plugin:plugin of the group pagedctl.plugins, package acme_plugin",
        "rule: a plug-in gives a Plugin whose contracts and leaves have names of their own",
        "remedy: mend or uninstall acme_plugin",
    ]
    with pytest.raises(ConfigError) as caught:
        found.require_sound()
    assert caught.value.faults == found.faults


def test_a_broken_plug_in_does_not_take_the_sound_ones_with_it(modules: Path) -> None:
    (modules / "acme_plugin.py").write_text(SOUND)
    (modules / "other_plugin.py").write_text(SOUND.replace('"acme"', '"other"'))
    points = [point("other_plugin:plugin", "other"), point(), point("none:plugin", "gone")]
    found = discover(points)
    assert found.plugins == ("acme",)
    assert [fault.what.split(": ")[0] for fault in found.faults] == [
        "plug-in gone cannot be loaded",
        "plug-in other cannot be loaded",
    ]
    # The other's contract has a free name and goes with its leaf, whose name is taken.
    assert "leaf acme.block_sumexp is registered twice" in found.faults[1].what
    assert found.envelopes.names() == ("fast", "invariant", "rl-bitwise", "acme")
    assert discover(reversed(points)).plugins == found.plugins
    assert found.contract_remedy() == "; ".join(
        f"{fault.remedy}: {fault.what}" for fault in found.faults
    )


def test_the_versions_are_of_the_packages_that_serve(modules: Path) -> None:
    (modules / "acme_plugin.py").write_text(SOUND)
    (modules / "other_plugin.py").write_text(
        SOUND.replace('"acme"', '"other"').replace("acme.block_sumexp", "other.block_sumexp")
    )
    points = {name: point(f"{name}_plugin:plugin", name) for name in ("acme", "other")}
    for name, version in (("acme", "2.1"), ("other", "7")):
        info = modules / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        vars(points[name])["dist"] = PathDistribution(info)
    found = discover(points.values()).require_sound()
    assert found.versions_of("acme", ()) == {"acme": "2.1"}
    assert found.versions_of("invariant", {"other.block_sumexp"}) == {"other": "7"}
    assert found.versions_of("acme", {"other.block_sumexp"}) == {"acme": "2.1", "other": "7"}
    assert found.versions_of("invariant", {"torch.block_sumexp"}) == {}
    assert discover([point()]).versions_of("acme", ()) == {"acme_plugin": "unknown"}


def test_what_a_plug_in_prints_does_not_reach_stdout(
    modules: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (modules / "acme_plugin.py").write_text(f"print('acme is here')\n{SOUND}")
    assert discover([point()]).plugins == ("acme",)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "acme is here\n")


def in_a_process(modules: Path, code: str, *, point: str = "acme_plugin:plugin") -> str:
    """Run *code* where a distribution in *modules* offers the plug-in."""
    info = modules / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[pagedctl.plugins]\nacme = {point}\n")
    program = f"import sys\nsys.path.insert(0, {str(modules)!r})\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return done.stdout


@pytest.mark.parametrize(
    "first", ["acme_plugin", "pagedctl.config.groups", "pagedctl.plugins", "pagedctl.cli.main"]
)
def test_whoever_is_imported_first_the_plug_in_is_there_and_torch_is_not(
    modules: Path, first: str
) -> None:
    (modules / "acme_plugin.py").write_text(SOUND)
    code = (
        f"import {first}\n"
        "from pagedctl.config.engine_config import EngineConfig\n"
        "config = EngineConfig(numerics='acme')\n"
        "print(config.contract['logprob_basis'], config.contract['batch_invariant'])\n"
        "print(*(name for name in ('torch', 'numpy', 'transformers') if name in sys.modules))"
    )
    assert in_a_process(modules, code) == "raw True\n\n"


def test_a_plug_in_that_imports_what_is_being_imported_is_refused(modules: Path) -> None:
    added, problem = BROKEN["a circular import"]
    (modules / "acme_plugin.py").write_text(f"{SOUND}\n{added}\n")
    code = (
        "from pagedctl.config.engine_config import EngineConfig\n"
        "from pagedctl.errors import ConfigError\n"
        "try: EngineConfig()\n"
        "except ConfigError as error: print(error)"
    )
    lines = in_a_process(modules, code).splitlines()
    assert lines[0].startswith(f"error: plug-in acme cannot be loaded: {problem}")
    assert lines[-1] == "remedy: mend or uninstall acme"


def test_the_example_of_the_page_is_a_sound_plug_in_whose_leaf_sums_blocks(modules: Path) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    contracts, leaves = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (modules / "acme_contracts.py").write_text(contracts)
    (modules / "acme_leaves.py").write_text(leaves)
    code = (
        "import torch\n"
        "from importlib.metadata import EntryPoint\n"
        "from pagedctl.numerics.plugins import ENTRY_POINTS, discover\n"
        "from pagedctl_kernels import sites\n"
        "from pagedctl_kernels.leaf import BATCH_INVARIANT, Requirement\n"
        "from pagedctl_kernels.machine import this_machine\n"
        "from pagedctl_kernels.plan import plan\n"
        "entry = EntryPoint('acme', 'acme_contracts:plugin', ENTRY_POINTS)\n"
        "found = discover([entry]).require_sound()\n"
        "site = sites.block_sumexp_site('block_sumexp', dtype='float32', block_size=128)\n"
        "required = Requirement(features=frozenset({BATCH_INVARIANT}))\n"
        "bound = plan(found.leaves, site, this_machine('cpu'), required)\n"
        "x = -torch.rand(3, 300)\n"
        "sums = bound.run(x, block_size=128)\n"
        "want = [part.exp().sum(-1) for part in x.double().split(128, -1)]\n"
        "print(bound.leaf.name, *sums.shape, sums.dtype)\n"
        "print(torch.allclose(sums.double(), torch.stack(want, -1), rtol=1e-6, atol=0))\n"
        "print(torch.equal(sums[1:2], bound.run(x[1:2], block_size=128)))"
    )
    assert in_a_process(modules, code, point="acme_contracts:plugin").split("\n") == [
        "acme.block_sumexp 3 3 torch.float32",
        "True",
        "True",
        "",
    ]


def test_every_name_for_authors_is_there_and_loads_no_torch(modules: Path) -> None:
    (modules / "acme_plugin.py").write_text(SOUND)
    code = (
        "import pagedctl.plugins as names\n"
        "assert all(getattr(names, one) is not None for one in names.__all__)\n"
        "print(*(one for one in ('torch', 'numpy', 'typer', 'tokenizers') if one in sys.modules))"
    )
    assert in_a_process(modules, code) == "\n"
