"""The surface as data: which command takes which option groups, and its own options.

The command line, the plan-file checker and the generated reference all read this table, so
a name can only exist once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pagedctl.config.groups import (
    ContractOptions,
    EngineOptions,
    FilesOptions,
    JsonlOptions,
    ModelOptions,
    ParallelOptions,
    SamplingOptions,
)
from pagedctl.config.kinds import (
    Assumptions,
    Boolean,
    Choice,
    Duration,
    Integer,
    Kind,
    ListOf,
    Number,
    Pattern,
    Size,
    Text,
)
from pagedctl.config.options import Option, options_of


@dataclass(frozen=True, kw_only=True)
class Group:
    """A shared option group: its plan table (None: flags only) and its help panel."""

    name: str
    panel: str
    table: str | None
    options: Mapping[str, Option]


GROUPS: Mapping[str, Group] = {
    group.name: group
    for group in (
        Group(name="model", panel="Model", table="model", options=options_of(ModelOptions)),
        Group(
            name="contract",
            panel="Contract",
            table="numerics",
            options=options_of(ContractOptions),
        ),
        Group(name="engine", panel="Engine", table="engine", options=options_of(EngineOptions)),
        Group(
            name="parallel",
            panel="Parallel",
            table="parallel",
            options=options_of(ParallelOptions),
        ),
        Group(
            name="sampling",
            panel="Sampling",
            table="workload.sampling",
            options=options_of(SamplingOptions),
        ),
        Group(name="files", panel="Files", table=None, options=options_of(FilesOptions)),
        Group(name="jsonl", panel="Files", table=None, options=options_of(JsonlOptions)),
    )
}

SINGLE_SWITCHES_PANEL = "Single switches"
PRESET_OPTIONS = frozenset({"numerics", "topology_invariant", "unverified", "explain_numerics"})


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command: ``groups`` by name, its own ``options``, and positional ``arguments``."""

    name: str
    help: str
    groups: tuple[str, ...] = ()
    options: Mapping[str, Option] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()

    def all_options(self) -> Mapping[str, Option]:
        """Shared and own options by name."""
        found: dict[str, Option] = {}
        for group in self.groups:
            found.update(GROUPS[group].options)
        found.update(self.options)
        return found


def _own(*options: Option) -> Mapping[str, Option]:
    return {one.name: one for one in options}


def _file(name: str, help: str, **more: bool) -> Option:
    return Option(name=name, kind=Text(metavar="FILE", path="always"), help=help, **more)  # type: ignore[arg-type]


def _flag(name: str, help: str, default: bool = False) -> Option:
    return Option(name=name, kind=Boolean(), help=help, default=default)


def _count(name: str, help: str, default: int | None, minimum: int = 1) -> Option:
    return Option(name=name, kind=Integer(minimum=minimum), help=help, default=default)


def _many(name: str, kind: Kind, help: str) -> Option:
    return Option(name=name, kind=kind, help=help, default=(), repeatable=True)


_WORKLOAD = Option(
    name="workload",
    kind=Text(metavar="SPEC", path="if_exists"),
    help="NAME[:key=value,...] or a JSON lines file",
    default="uniform",
)
_BISECT = _flag("bisect", "name the first module or switch at fault", default=True)
_PROMPTS = _file("prompts", "JSON lines of prompts")
_SWITCHED = ("model", "contract", "engine", "parallel")


def _listed(option: Option, help: str) -> Option:
    return replace(option, kind=ListOf(item=option.kind), help=help, default=None)


_PLAN_LISTS = (
    _listed(GROUPS["parallel"].options["tp"], "ranks of one engine, one row each"),
    _listed(
        GROUPS["engine"].options["gpu_memory_utilization"],
        "share of total device memory, one row each",
    ),
    _listed(GROUPS["engine"].options["max_model_len"], "prompt + output tokens, one column each"),
)

_COMMANDS: tuple[Command, ...] = (
    Command(
        name="generate",
        help="Sample completions.",
        groups=(*_SWITCHED, "sampling", "files", "jsonl"),
        options=_own(
            _many("prompt", Text(), "a prompt as text; repeatable"),
            _flag("chat", "a text prompt becomes one user message"),
            _many("keep", Text(metavar="FIELD"), "copy this input field to the metadata"),
            _flag(
                "resume",
                "finish an interrupted output; refused if the input, the model or an option that "
                "decides a line is another",
            ),
            Option(
                name="ray",
                kind=Text(metavar="ADDRESS"),
                help="serve on a Ray cluster; not in this version",
                optional_value=True,
            ),
            _count("replicas", "engines of a Ray fleet; not in this version", None),
        ),
    ),
    Command(
        name="score",
        help="Teacher-forced logprobs of given ids.",
        groups=(*_SWITCHED, "files", "jsonl"),
        options=_own(
            _count("start", "index of the first scored token in lines that do not say", 1),
            Option(
                name="temperature",
                kind=Number(minimum=1e-12, maximum=1e6, or_zero=True),
                help="temperature of lines that do not say",
                default=1.0,
            ),
            _flag("check", "compare with the lines' own logprobs, bit for bit"),
        ),
    ),
    Command(
        name="bench",
        help="Measure on stated work.",
        groups=(*_SWITCHED, "sampling", "files"),
        options=_own(
            _WORKLOAD,
            _count("warmup", "untimed runs", 1, minimum=0),
            _count("repeats", "timed runs", 3),
            Option(name="suite", kind=Text(metavar="NAME"), help="the fixed workloads of a device"),
        ),
    ),
    Command(
        name="compare",
        help="Manifests side by side; the first is the baseline.",
        groups=("files",),
        options=_own(_many("require", Text(metavar="RULE"), "exit 1 unless this holds")),
        arguments=("files",),
    ),
    Command(
        name="plan",
        help="Does it fit, and how fast.",
        groups=(*_SWITCHED, "files"),
        options=_own(
            Option(name="gpu", kind=Text(metavar="NAME"), help="a GPU of the catalogue"),
            Option(name="gpu_mem", kind=ListOf(item=Size()), help="total memory per rank"),
            Option(
                name="batch",
                kind=ListOf(item=Integer(minimum=1)),
                help="decode points",
                default=(1, 16, 64),
            ),
            Option(
                name="context",
                kind=ListOf(item=Integer(minimum=1)),
                help="cached tokens of the decode points",
                default=(4096,),
            ),
            _many("assume", Assumptions(), "replace an assumed term"),
            _file("probe", "measured links and device"),
            _file("calibrate", "a bench manifest to calibrate with"),
            _file("compare_log", "an engine's start-up log"),
            Option(
                name="lengths",
                kind=Text(metavar="SPEC", path="if_exists"),
                help="a length distribution",
            ),
            _count("requests", "requests to finish by the deadline", None),
            Option(name="deadline", kind=Duration(), help="time for the requests"),
            _file("plot", "write a plot here"),
            *_PLAN_LISTS,
        ),
    ),
    Command(
        name="probe",
        help="Measure links and device.",
        groups=("model", "parallel", "files"),
        options=_own(
            Option(
                name="ops",
                kind=ListOf(
                    item=Choice(
                        values=(
                            "all_reduce",
                            "all_gather",
                            "reduce_scatter",
                            "all_to_all",
                            "consensus",
                            "memory",
                            "gemm",
                            "launch",
                        )
                    )
                ),
                help="what to measure",
                default_text="all that apply",
            ),
            Option(
                name="sizes",
                kind=Pattern(
                    regex=r"\d+(\.\d+)?(KiB|MiB|GiB)?(\.\.\d+(\.\d+)?(KiB|MiB|GiB)?)?",
                    form="SIZE or SIZE..SIZE",
                    metavar="SIZE..SIZE",
                ),
                help="powers of two, total bytes",
                default_text="8KiB..64MiB",
            ),
            Option(
                name="rows", kind=ListOf(item=Integer(minimum=1)), help="decode rows of the model"
            ),
            _count("iterations", "timed iterations", 50),
            _count("warmup", "untimed iterations", 10, minimum=0),
            _file("compare", "an nccl-tests JSON file"),
        ),
    ),
    Command(
        name="parity",
        help="Is it the model that transformers runs.",
        groups=(*_SWITCHED, "files"),
        options=_own(
            _file("hf_ref", "a stored reference; bare: make one now", optional_value=True),
            _file("ref", "a greedy result of another engine"),
            Option(
                name="tie_margin",
                kind=Number(minimum=0),
                help="logit margin of a near tie",
                default=0.1,
            ),
            _PROMPTS,
            _count("requests", "prompts to compare", 8),
            _count("max_tokens", "tokens of each", 64),
            _BISECT,
        ),
    ),
    Command(
        name="parity make-ref",
        help="Write a transformers reference.",
        groups=("model", "files"),
        options=_own(
            Option(
                name="output", kind=Text(metavar="FILE"), help="the reference to write", short="-o"
            ),
            _PROMPTS,
            _count("requests", "prompts to compare", 8),
            _count("max_tokens", "tokens of each", 64),
        ),
    ),
    Command(
        name="invariance",
        help="Same bits whatever shares the batch.",
        groups=(*_SWITCHED, "files"),
        options=_own(
            _count("requests", "requests", 64),
            _count("max_tokens", "tokens of each", 64),
            _PROMPTS,
            Option(
                name="cases",
                kind=ListOf(
                    item=Choice(
                        values=(
                            "alone",
                            "packed",
                            "repeat",
                            "process",
                            "chunks",
                            "pools",
                            "preemption",
                            "prefix",
                            "rescore",
                            "graphs",
                            "sampled",
                            "topology",
                        )
                    )
                ),
                help="cases to run",
                default_text="all that apply",
            ),
            _count("processes", "process lifetimes", 2),
            _file("record", "on a pass write a verification record", optional_value=True),
            _file("junit", "write a JUnit file"),
            _BISECT,
        ),
    ),
    Command(
        name="align",
        help="Are they the trainer's bits.",
        groups=(*_SWITCHED, "files"),
        options=_own(
            _many("dump", Text(metavar="FILE", path="always"), "a trainer dump; repeatable"),
            _file("record", "on a pass write a verification record", optional_value=True),
            _BISECT,
        ),
    ),
    Command(
        name="validate",
        help="Run a plan file's steps, judge its acceptance.",
        groups=("files",),
        options=_own(
            Option(name="output", kind=Text(metavar="DIR"), help="folder of the run", short="-o"),
            Option(
                name="model",
                kind=Text(metavar="MODEL", path="if_exists"),
                help="the model on this machine",
            ),
            Option(name="steps", kind=ListOf(item=Text()), help="steps to run"),
            _flag("wait", "wait for another heavy job's lock", default=True),
            _flag("wait_idle", "wait for an idle machine"),
        ),
        arguments=("plan",),
    ),
    Command(
        name="profile",
        help="Where a step's time goes.",
        groups=(*_SWITCHED, "files"),
        options=_own(
            _WORKLOAD,
            _count("steps", "steps to profile", 64),
            _file("trace", "write a Chrome trace"),
        ),
    ),
    Command(name="env", help="Versions, devices, and what works and why not.", groups=("files",)),
    Command(
        name="models list",
        help="The embedded model, built-in architectures and local snapshots.",
        groups=("files",),
    ),
    Command(
        name="models inspect",
        help="A model's resolved spec, tensors and bytes.",
        groups=("files",),
        options=_own(_count("tp", "ranks of one engine", 1)),
        arguments=("model",),
    ),
    Command(
        name="serve",
        help="Serve over HTTP.",
        groups=(*_SWITCHED, "sampling", "files"),
    ),
)

COMMANDS: Mapping[str, Command] = {command.name: command for command in _COMMANDS}

VALIDATE_RUNS = (
    "generate",
    "score",
    "bench",
    "compare",
    "plan",
    "probe",
    "parity",
    "parity make-ref",
    "invariance",
    "align",
    "profile",
    "import",
)
"""What a validate step may run; ``import`` takes a file that was made elsewhere."""

PLAN_TABLES: Mapping[str, Mapping[str, Option]] = {
    **{group.table: group.options for group in GROUPS.values() if group.table is not None},
    "hardware": {
        name: option
        for name, option in COMMANDS["plan"].options.items()
        if option not in _PLAN_LISTS
    },
    "workload": _own(_WORKLOAD),
}
