"""Word problems: stable draws, disjoint splits, solutions that are right, a strict reward."""

from __future__ import annotations

import re
import subprocess
import sys
from hashlib import sha256

import pytest

from pagedctl.rollout.word_problems import (
    SPLITS,
    Split,
    WordProblem,
    generate,
    parse_answer,
    reward,
)

PINNED: dict[Split, str] = {
    "train": "ecfbf9e1b098894181680a238645de91e1dc88687d22988d13232017bb15a0ce",
    "heldout": "f4b13612b9403b263dc163e0f7b5dc930b32764cd2db8cd3c5ca138f2d712514",
    "hard_train": "7777b8cdbcdccc66870135f882193059df75eb0a65359def0439ca8849577a3e",
    "hard": "d6e55a03a0776a26f6338fa60bf5562d002ebef07fdfdd2c8666ac2a3168c9b0",
}
"""sha256 over the first 200 problems of seed 0, one line each (see :func:`digest`)."""

BUCKETS: dict[Split, range] = {
    "train": range(2, 16),
    "heldout": range(0, 1),
    "hard_train": range(2, 16),
    "hard": range(1, 2),
}

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)\. ")


def digest(problems: list[WordProblem]) -> str:
    lines = [f"{p.prompt}\t{p.solution}\t{p.answer}\t{p.steps}\t{p.split}\n" for p in problems]
    return sha256("".join(lines).encode()).hexdigest()


@pytest.mark.parametrize("split", SPLITS)
def test_draws_are_the_same_on_every_machine(split: Split) -> None:
    assert digest(generate(0, 200, split)) == PINNED[split]


def test_digest_sees_one_changed_number() -> None:
    problems = generate(0, 200, "train")
    last = problems[-1]
    changed = WordProblem(
        prompt=last.prompt,
        solution=last.solution,
        answer=last.answer + 1,
        steps=last.steps,
        split=last.split,
    )
    assert digest([*problems[:-1], changed]) != digest(problems)


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    assert generate(3, 80, "train")[:50] == generate(3, 50, "train")
    assert generate(4, 50, "train") != generate(3, 50, "train")
    assert generate(3, 0, "train") == []


# -- splits


@pytest.mark.parametrize("split", SPLITS)
def test_a_split_holds_only_its_buckets(split: Split) -> None:
    seen = {sha256(p.prompt.encode()).digest()[0] % 16 for p in generate(1, 400, split)}
    assert seen == set(BUCKETS[split])


def test_no_training_problem_is_held_out() -> None:
    trained = {p.prompt for p in generate(1, 60_000, "train")}
    heldout = {p.prompt for p in generate(2, 6_000, "heldout")}
    again = {p.prompt for p in generate(2, 6_000, "train")}
    assert not trained & heldout
    # Short problems do come twice, so an empty intersection says something.
    assert trained & again


def test_no_hard_problem_is_trained_on() -> None:
    trained = {p.prompt for split in ("train", "hard_train") for p in generate(1, 4_000, split)}
    assert not trained & {p.prompt for p in generate(1, 2_000, "hard")}


def test_difficulty() -> None:
    for split in SPLITS:
        problems = generate(5, 600, split)
        base = split in ("train", "heldout")
        assert {p.steps for p in problems} == ({1, 2, 3, 4} if base else {5, 6})
        assert min(p.answer for p in problems) > 0
        assert max(p.answer for p in problems) <= (300 if base else 2500)
    assert max(p.answer for p in generate(5, 600, "hard")) > 300


def test_the_documented_prompt_is_in_the_distribution() -> None:
    form = re.compile(r"\w+ has \d+ \w+ and buys \d+\. How many\?")
    assert any(form.fullmatch(p.prompt) for p in generate(0, 5_000, "train"))


def test_an_unknown_split_or_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown split 'test'; known: train, heldout"):
        generate(0, 1, "test")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be"):
        generate(0, -1, "train")


# -- solutions


def arithmetic_fault(problem: WordProblem) -> str | None:
    """The first thing wrong with the written solution taken by itself, or None."""
    body, marker, stated = problem.solution.partition("Answer: ")
    equations = EQUATION.findall(body)
    if not marker or EQUATION.sub("", body):
        return "the solution is not a chain of equations and an answer"
    for left, sign, right, result in equations:
        a, b, c = int(left), int(right), int(result)
        right_value = {"+": a + b == c, "-": a - b == c, "*": a * b == c, "/": b * c == a}[sign]
        if not right_value:
            return f"{left} {sign} {right} is not {result}"
    if len(equations) != problem.steps:
        return f"{len(equations)} equations, {problem.steps} steps"
    if not stated == equations[-1][3] == str(problem.answer):
        return f"states {stated}, the last result is {equations[-1][3]}"
    return None


TIMES = {"twice": 2, "three times": 3, "four times": 4, "five times": 5}
PACKS = r"(?:boxes|bags|packs|jars)"
CLAUSES = {
    "two kinds": r"has (\d+) \w+ \w+ and (\d+) \w+ \w+",
    "packs": rf"has (\d+) {PACKS} with (\d+) \w+ each",
    "fewer": r"has (\d+) fewer than",
    "more": r"has (\d+) more than",
    "times": rf"(?:has|ends up with) ({'|'.join(TIMES)}) as many",
    "start": r"has (\d+) \w+",
    "buys packs": rf"buys (\d+) {PACKS} with (\d+) \w+ each",
    "gain": r"(?:buys|finds|gets|wins) (\d+)",
    "gives each": r"gives (\d+) to each of (\d+) friends",
    "loss": r"(?:gives away|gives|loses|sells|uses) (\d+)",
    "share": r"(?:splits|shares) them (?:evenly into|equally among) (\d+)",
    "together": r"(have together)\?",
}
CLAUSE = re.compile("|".join(f"({pattern})" for pattern in CLAUSES.values()))


def solve(prompt: str) -> int:
    """The answer, read from the story alone: an implementation that shares nothing."""
    total, other = 0, 0
    for match in CLAUSE.finditer(prompt):
        kind = next(k for k, v in CLAUSES.items() if re.fullmatch(v, match[0]))
        words = [group for group in re.fullmatch(CLAUSES[kind], match[0]).groups() if group]  # type: ignore[union-attr]
        n = [
            TIMES[word] if word in TIMES else int(word) for word in words if word != "have together"
        ]
        if kind == "start":
            total = other = n[0]
        elif kind == "two kinds":
            total = n[0] + n[1]
        elif kind == "packs":
            total = n[0] * n[1]
        elif kind in ("more", "gain"):
            total += n[0]
        elif kind in ("fewer", "loss"):
            total -= n[0]
        elif kind == "times":
            total *= n[0]
        elif kind == "buys packs":
            total += n[0] * n[1]
        elif kind == "gives each":
            total -= n[0] * n[1]
        elif kind == "share":
            total, rest = divmod(total, n[0])
            assert rest == 0, prompt
        else:
            total += other
    return total


@pytest.mark.parametrize("split", SPLITS)
def test_written_steps_are_right(split: Split) -> None:
    faults = {p.prompt: arithmetic_fault(p) for p in generate(7, 1_000, split)}
    assert {prompt: fault for prompt, fault in faults.items() if fault} == {}


@pytest.mark.parametrize(
    ("solution", "answer", "steps"),
    [
        ("3 + 4 = 8. Answer: 8", 8, 1),
        ("3 + 4 = 7. Answer: 8", 8, 1),
        ("3 + 4 = 7. Answer: 7", 8, 1),
        ("3 + 4 = 7. Answer: 7", 7, 2),
        ("9 / 2 = 4. Answer: 4", 4, 1),
        ("3 + 4 = 7. So 7. Answer: 7", 7, 1),
        ("3 + 4 = 7.", 7, 1),
    ],
)
def test_wrong_steps_are_noticed(solution: str, answer: int, steps: int) -> None:
    problem = WordProblem(prompt="", solution=solution, answer=answer, steps=steps, split="train")
    assert arithmetic_fault(problem) is not None


@pytest.mark.parametrize("split", SPLITS)
def test_the_answer_follows_from_the_story(split: Split) -> None:
    problems = generate(8, 1_000, split)
    assert [p.prompt for p in problems if solve(p.prompt) != p.answer] == []


def test_the_reader_of_stories_is_not_the_generator() -> None:
    assert solve("Tom has 3 apples and buys 4. How many?") == 7
    assert (
        solve(
            "Mia has 5 pens. Zoë has 3 fewer than Mia. Then she buys 2 bags with 4 pens each and "
            "gives 2 to each of 3 friends. How many pens do Zoë and Mia have together?"
        )
        == 5 - 3 + 2 * 4 - 2 * 3 + 5
    )


def test_prompts_are_one_line_and_ask() -> None:
    for split in SPLITS:
        for problem in generate(9, 300, split):
            assert re.fullmatch(r"[^\s].*\?", problem.prompt), problem.prompt
            assert "  " not in problem.prompt


# -- reward


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" 3 + 4 = 7. Answer: 7", 7),
        ("Answer: 7<|im_end|>", 7),
        ("Answer:7.", 7),
        ("Answer:\t0", 0),
        ("Answer: 007", 7),
        ("Answer: -3", -3),
        ("Answer: 1 Answer: 2", 2),
        ("Answer: 7\nAnswer: seven", 7),
        (f"Answer: {10**18 - 1}", 10**18 - 1),
        (f"Answer: {10**18}", None),
        ("Answer: " + "9" * 5_000, None),
        ("Answer: 7.5", None),
        ("Answer: 1,000", None),
        ("Answer: 7/2", None),
        ("Answer: 7 / 2", 7),
        ("Answer: \u0667", None),
        ("Answer: 7\u0667", None),
        ("Answer: \u22127", None),
        ("Answer: 7apples", None),
        ("Answer: 7 apples", 7),
        ("Answer: 7 Answer: 1,000", 7),
        ("Answer:\n7", None),
        ("answer: 7", None),
        ("7", None),
        ("", None),
        ("🙂\ud800 Answer: 7", 7),
    ],
)
def test_parse_answer(text: str, answer: int | None) -> None:
    assert parse_answer(text) == answer


def test_reward_is_one_for_exactly_the_answer() -> None:
    problems = generate(0, 50, "heldout")
    for problem in problems:
        assert reward(problem, f" {problem.solution}") == 1.0
        assert reward(problem, f"Answer: {problem.answer + 1}") == 0.0
        assert reward(problem, str(problem.answer)) == 0.0
        assert reward(problem, "") == 0.0


def test_the_module_needs_no_torch() -> None:
    code = "import sys, pagedctl.rollout.word_problems; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
