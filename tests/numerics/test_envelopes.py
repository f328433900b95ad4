"""Contracts of other packages: what their resolvers may do to the tree, and what not."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pagedctl.errors import Fault, NumericsRefused
from pagedctl.numerics.envelopes import Envelope, Envelopes, add_nothing, house_envelopes
from pagedctl.numerics.resolution import (
    Choices,
    Resolution,
    draft_numerics,
    resolve_numerics,
)
from pagedctl.numerics.switches import SWITCHES, Value, switch_named

GOVERNED: dict[str, Value] = {
    "deterministic_kernels": True,
    "batch_invariant": True,
    "deterministic_collectives": True,
    "symmetric_memory": False,
    "layer_boundary_norm": "unfused",
}
LOOSER: dict[str, Value] = {
    "deterministic_kernels": False,
    "batch_invariant": False,
    "deterministic_collectives": False,
    "symmetric_memory": True,
    "layer_boundary_norm": "fused",
}


def contract(resolve: Callable[[Choices], None], *, bitwise: bool = True) -> Envelope:
    return Envelope(name="acme", bitwise=bitwise, promise="acme's", resolve=resolve)


def draft(resolve: Callable[[Choices], None], **given: Value) -> Resolution:
    return draft_numerics(contract(resolve), given, dict.fromkeys(given, "flag"))


def test_a_bitwise_contract_that_asks_for_nothing_has_every_pin() -> None:
    tree = draft(add_nothing).numerics
    assert {name: tree[name] for name in GOVERNED} == GOVERNED
    for switch, value in LOOSER.items():
        (fault,) = draft(add_nothing, **{switch: value}).faults
        assert fault.what.endswith("is looser than the contract acme")


@pytest.mark.parametrize("switch", LOOSER)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("by", ["tighten", "veto"])
def test_a_bitwise_contract_that_loosens_a_pin_holds_nowhere(
    switch: str, given: bool, by: str
) -> None:
    def loosen(choices: Choices) -> None:
        if by == "tighten":
            choices.tighten(switch, LOOSER[switch])
        else:
            choices.veto(switch, GOVERNED[switch], instead=LOOSER[switch], why="speed")

    chosen = {switch: LOOSER[switch]} if given else {}
    found = draft(loosen, **chosen)
    assert found.numerics[switch] == GOVERNED[switch]
    assert "\n".join(found.faults[-1].lines()).startswith(
        f"error: the contract acme loosens {switch} to "
    )
    assert len(found.faults) == 1 + given
    with pytest.raises(NumericsRefused):
        resolve_numerics(contract(loosen), chosen, {})


def test_a_loosening_contract_is_refused_word_for_word() -> None:
    def loosen(choices: Choices) -> None:
        choices.tighten("batch_invariant", False)
        choices.veto("logprob_order", "torch", instead="blockwise", why="the trainer's form")
        choices.tighten("logprob_order", "torch")

    assert ["\n".join(one.lines()) for one in draft(loosen).faults] == [
        """\
error: the contract acme loosens batch_invariant to off
where: contract acme, switch batch_invariant
rule: it already needs batch_invariant on, and a contract only tightens
remedy: mend the package that offers the contract, or use another one""",
        """\
error: the contract acme loosens logprob_order to torch
where: contract acme, switch logprob_order
rule: it already needs logprob_order another value than torch, and a contract only tightens
remedy: mend the package that offers the contract, or use another one""",
    ]


def random_value(rng: random.Random, switch: str) -> Value:
    known = switch_named(switch)
    if switch == "logprob_order":
        return rng.choice(["torch", "blockwise", "blockwise-16384", "blockwise-direct"])
    return rng.choice(known.values or (128, 256))


def random_resolver(rng: random.Random) -> Callable[[Choices], None]:
    """Up to eight calls that tighten or veto a switch, in any way that has the right types."""
    calls: list[tuple[str, str, tuple[Value, ...]]] = []
    for _ in range(rng.randint(0, 8)):
        switch = rng.choice(SWITCHES).name
        values = tuple(random_value(rng, switch) for _ in range(rng.randint(1, 3)))
        calls.append((rng.choice(["tighten", "veto"]), switch, values))

    def resolve(choices: Choices) -> None:
        for call, switch, values in calls:
            if call == "tighten":
                choices.tighten(switch, *values)
            else:
                choices.veto(switch, values[0], instead=values[-1], why="random")

    return resolve


def twice(resolve: Callable[[Choices], None]) -> Callable[[Choices], None]:
    def run(choices: Choices) -> None:
        resolve(choices)
        resolve(choices)

    return run


def test_no_resolver_of_a_bitwise_contract_gets_below_what_bitwise_means() -> None:
    """3,000 random contracts: the pins hold in each, and what one step held, no later one frees."""
    rng = random.Random(4)
    sound = loosening = 0
    for _ in range(3000):
        names = rng.sample([one.name for one in SWITCHES], rng.randint(0, 4))
        given = {name: random_value(rng, name) for name in names}
        resolver = random_resolver(rng)
        found = draft(resolver, **given)
        assert {name: found.numerics[name] for name in GOVERNED} == GOVERNED
        for one in SWITCHES:
            value = found.numerics[one.name]
            assert value == one.loose or one.takes(value)
            assert sum(each.switch == one.name for each in found.refused) <= 1
            if one.name in given and not found.faults:
                assert value == given[one.name]
        # What held after one pass holds after a second: nothing was widened on the way.
        again = draft(twice(resolver), **given)
        assert bool(again.faults) == bool(found.faults)
        if not found.faults:
            assert again.numerics.settings == found.numerics.settings
            sound += 1
        loosening += any("loosens" in fault.what for fault in found.faults)
    assert sound > 300
    assert loosening > 300


def test_the_first_of_the_values_is_set_and_a_given_one_among_them_is_kept() -> None:
    def keep(choices: Choices) -> None:
        choices.tighten("logprob_order", "blockwise-16384", "blockwise-direct-16384")

    tree = draft(keep).numerics.settings["logprob_order"]
    assert (tree.value, tree.set_by) == ("blockwise-16384", "contract")
    given = draft(keep, logprob_order="blockwise-direct-16384").numerics.settings
    assert given["logprob_order"].set_by == "flag"
    (fault,) = draft(keep, logprob_order="blockwise").faults
    assert fault.rule.startswith(
        "acme needs logprob_order blockwise-16384 or blockwise-direct-16384: "
    )


def test_a_contract_refuses_with_a_reason_of_its_own() -> None:
    fault = Fault(what="no", where="acme", rule="acme's rule", remedy="another model")
    with pytest.raises(NumericsRefused) as caught:
        resolve_numerics(contract(lambda choices: choices.refuse(fault)), {}, {})
    assert caught.value.faults == (fault,)


def test_a_contract_without_bits_cannot_promise_them_at_every_tp() -> None:
    def promise(choices: Choices) -> None:
        choices.tighten("topology_invariant", True)

    (fault,) = draft_numerics(contract(promise, bitwise=False), {}, {}).faults
    assert fault.what == "topology_invariant cannot be kept under the contract acme"
    assert fault.where == "switch topology_invariant, set by contract"
    assert not draft_numerics(contract(promise), {}, {}).faults


@pytest.mark.parametrize(
    ("switch", "value", "kind"),
    [
        ("batch_invariance", True, KeyError),
        ("batch_invariant", "on", ValueError),
        ("batch_invariant", 1, ValueError),
        ("logprob_order", "megatron", ValueError),
        ("padded_vocab_size", 0, ValueError),
        ("layer_boundary_norm", None, ValueError),
    ],
)
def test_a_resolver_cannot_set_what_no_switch_has(
    switch: str, value: Value, kind: type[Exception]
) -> None:
    choices = Choices("acme", {}, {})
    with pytest.raises(kind):
        choices.tighten(switch, value)
    with pytest.raises(kind):
        choices.veto(switch, value, instead=value, why="none")


def test_a_resolver_cannot_rewrite_what_was_given() -> None:
    def rewrite(choices: Choices) -> None:
        choices.given["batch_invariant"] = True  # type: ignore[index]

    (fault, _) = draft(rewrite, batch_invariant=False).faults[::-1]
    assert fault.what.startswith("the resolver of the contract acme failed: TypeError: ")


@pytest.mark.parametrize("problem", [ZeroDivisionError("by nothing"), KeyError("x"), SystemExit(0)])
def test_a_resolver_or_a_check_that_fails_is_a_refusal_that_says_where(
    problem: BaseException,
) -> None:
    """What a package raises is its fault: neither a traceback of ours nor a silent end."""

    def fail(*arguments: object) -> None:
        raise problem

    (fault,) = draft(fail).faults
    assert fault.what.startswith(
        f"the resolver of the contract acme failed: {type(problem).__name__}: "
    )
    assert fault.where.startswith(f"{__file__}, line ")
    assert fault.where.endswith(", in fail")
    with pytest.raises(NumericsRefused):
        resolve_numerics(contract(fail), {}, {})
    checked = replace(contract(add_nothing), check_checkpoint=fail)
    facts: Any = None  # not looked at
    (fault,) = checked.checkpoint_faults(facts, draft(add_nothing).numerics)
    assert fault.what.startswith("check_checkpoint of the contract acme failed: ")


@pytest.mark.parametrize(
    ("gives", "told"),
    [(None, "'NoneType' object is not iterable"), (["no"], "'no' is no Fault")],
)
def test_a_check_that_gives_no_faults_is_a_refusal(gives: Any, told: str) -> None:
    checked = replace(contract(add_nothing), check_checkpoint=lambda facts, numerics: gives)
    facts: Any = None
    (fault,) = checked.checkpoint_faults(facts, draft(add_nothing).numerics)
    assert fault.what == f"check_checkpoint of the contract acme failed: TypeError: {told}"


@pytest.mark.parametrize(
    "evidence", [(), ("align",), ("vibes",), ("invariance", "vibes"), "invariance", ["invariance"]]
)
def test_a_contract_that_nobody_has_to_try_is_none(evidence: Any) -> None:
    """Without evidence every run would be verified, by nothing."""
    with pytest.raises((ValueError, TypeError), match="contract acme: evidence is "):
        replace(contract(add_nothing), evidence=evidence)
    for sound in (("invariance",), ("invariance", "align")):
        assert replace(contract(add_nothing), evidence=sound).evidence == sound


@pytest.mark.parametrize("name", ["", " ", "two words", "-x", "a=b", "a|b", "a\n", 7, None])
def test_a_name_that_no_command_line_can_say_names_no_contract(name: object) -> None:
    with pytest.raises(ValueError, match="cannot name a contract"):
        Envelope(name=name, bitwise=True, promise="", resolve=add_nothing)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["bitwise", "promise", "resolve", "check_checkpoint"])
def test_a_contract_of_wrong_types_is_none(field: str) -> None:
    sound = {"name": "acme", "bitwise": True, "promise": "", "resolve": add_nothing}
    with pytest.raises(TypeError, match="contract acme"):
        Envelope(**(sound | {field: 3.5}))  # type: ignore[arg-type]


def test_a_name_is_registered_once_and_a_registry_never_changes() -> None:
    house = house_envelopes()
    more = house.with_envelopes([contract(add_nothing)])
    assert more.names() == ("fast", "invariant", "rl-bitwise", "acme")
    assert more.bitwise_names() == ("invariant", "rl-bitwise", "acme")
    assert house.names() == ("fast", "invariant", "rl-bitwise")
    with pytest.raises(ValueError, match="contract acme is registered twice"):
        Envelopes([*more, contract(add_nothing)])
