"""The tree of numerical switches as data: what each governs and what it changes. No torch.

A switch stands alone: it has a flag of its own, no value before resolution, and names a
rounding semantics, not a kernel. Contracts are presets over these (``envelopes.py``);
``docs/numerics.md`` is the page about them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Value = bool | str | int | None
Changes = Literal["forward values", "logprobs only", "sampled tokens", "nothing"]
Branch = Literal[
    "kernels.deterministic",
    "collectives.deterministic",
    "sampling.deterministic",
    "invariance.batch",
    "invariance.topology",
    "logprob",
    "alignment.trainer",
]

LOGPROB_ORDER_PATTERN = r"torch|blockwise(-direct)?(-[1-9][0-9]{0,17})?"
OFF_OR_ON = (False, True)


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One switch. ``loose`` is its value without a contract; ``rule`` says what it fixes.

    Its values are those of a closed set, or texts of one form. The option of its name checks
    what a user gives; :meth:`takes` checks what a contract sets.
    """

    name: str
    branch: Branch
    loose: Value
    changes: Changes
    rule: str
    values: tuple[Value, ...] = ()
    form: str | None = None

    def takes(self, value: Value) -> bool:
        """Whether *value* is one of the switch's values; its loose value may be none of them."""
        if self.form is not None:
            return re.fullmatch(self.form, str(value)) is not None
        return any(type(one) is type(value) and one == value for one in self.values)


SWITCHES: tuple[Switch, ...] = (
    Switch(
        name="deterministic_kernels",
        branch="kernels.deterministic",
        loose=False,
        values=OFF_OR_ON,
        changes="forward values",
        rule="no autotune, no TF32 whatever the environment says, no atomics in a sum, and "
        "dependent launches only where every dependency waits",
    ),
    Switch(
        name="batch_invariant",
        branch="invariance.batch",
        loose=False,
        values=OFF_OR_ON,
        changes="forward values",
        rule="only leaves that declare batch_invariant, one declared order per call site",
    ),
    Switch(
        name="deterministic_collectives",
        branch="collectives.deterministic",
        loose=False,
        values=OFF_OR_ON,
        changes="forward values",
        rule="data movement and a fold in rank order, no fused all-reduce and norm, pinned NCCL",
    ),
    Switch(
        name="symmetric_memory",
        branch="collectives.deterministic",
        loose=True,
        values=OFF_OR_ON,
        changes="forward values",
        rule="no symmetric-memory route and no distributed arg-max",
    ),
    Switch(
        name="topology_invariant",
        branch="invariance.topology",
        loose=False,
        values=OFF_OR_ON,
        changes="forward values",
        rule="the same bits at every tp: no cross-rank sum",
    ),
    Switch(
        name="layer_boundary_norm",
        branch="alignment.trainer",
        loose=None,
        values=("fused", "unfused"),
        changes="forward values",
        rule="the residual sum is rounded to the model's dtype before the norm reads it",
    ),
    Switch(
        name="rope_table_dtype",
        branch="alignment.trainer",
        loose="float32",
        values=("float32", "model"),
        changes="forward values",
        rule="dtype to which the cos/sin table is rounded",
    ),
    Switch(
        name="norm_cast",
        branch="alignment.trainer",
        loose="before",
        values=("before", "after"),
        changes="forward values",
        rule="the normalised value is rounded before or after the weight is applied",
    ),
    Switch(
        name="activation_rounding",
        branch="alignment.trainer",
        loose="model",
        values=("model", "float32"),
        changes="forward values",
        rule="dtype of silu(gate) before it meets up",
    ),
    Switch(
        name="softmax_p_dtype",
        branch="alignment.trainer",
        loose="model",
        values=("model", "float32"),
        changes="forward values",
        rule="dtype of the attention probabilities before P V",
    ),
    Switch(
        name="head_dtype",
        branch="alignment.trainer",
        loose="model",
        values=("model", "float32"),
        changes="forward values",
        rule="dtype of the output projection's inputs",
    ),
    Switch(
        name="yarn_ramp_mask_device",
        branch="alignment.trainer",
        loose="host",
        values=("host", "cpu", "cuda"),
        changes="forward values",
        rule="where YaRN's ramp is computed",
    ),
    Switch(
        name="yarn_frequency_device",
        branch="alignment.trainer",
        loose="host",
        values=("host", "cpu", "cuda"),
        changes="forward values",
        rule="where YaRN's frequencies are computed",
    ),
    Switch(
        name="padded_vocab_size",
        branch="logprob",
        loose=None,
        form=r"[1-9][0-9]{0,9}",
        changes="logprobs only",
        rule="padding columns are exactly minus infinity",
    ),
    Switch(
        name="logprob_order",
        branch="logprob",
        loose="torch",
        form=LOGPROB_ORDER_PATTERN,
        changes="logprobs only",
        rule="block sums of the log-softmax and the form of the last subtraction",
    ),
    Switch(
        name="logprob_basis",
        branch="logprob",
        loose="scaled",
        values=("scaled", "raw", "processed"),
        changes="logprobs only",
        rule="what the reported logprob is of",
    ),
    Switch(
        name="temperature_form",
        branch="alignment.trainer",
        loose="divide",
        values=("divide", "multiply"),
        changes="sampled tokens",
        rule="one division by T, or one product with its reciprocal",
    ),
)

FIXED: Mapping[str, Value] = {"sampling_stream": "per-request", "ties": "lowest index"}
"""Held in every contract; shown in the tree, no flag."""

FIXED_BRANCH: Branch = "sampling.deterministic"


def switch_named(name: str) -> Switch:
    """The switch *name*; raises KeyError."""
    if name not in _BY_NAME:
        raise KeyError(f"no switch is called {name}")
    return _BY_NAME[name]


def spelled(value: object) -> str:
    """A value as a tree or a refusal shows it: one line, on and off for a bool."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    text = str(value)
    return text if text.isprintable() else repr(value)


_BY_NAME: Mapping[str, Switch] = {one.name: one for one in SWITCHES}
