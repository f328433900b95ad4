"""Integer arithmetic word problems with worked steps: a task whose reward can be computed.

A problem is a pure function of (seed, index, split). Every draw comes from
``random.Random.random()``, whose sequence Python documents as stable across versions.

Splits are disjoint by construction: a digest of the prompt's text puts each problem into one
of 16 buckets. ``heldout`` owns bucket 0, ``hard`` owns bucket 1, the two training splits own
the rest, so what is measured on cannot have been trained on, whatever the seeds.

* ``train``: 1 to 4 steps; what the embedded model is trained on, almost alone.
* ``heldout``: the same distribution; measures it.
* ``hard_train``: 5 or 6 steps and larger numbers; prompts for training further, by reward.
* ``hard``: the same distribution; measures the effect of that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice
from random import Random
from typing import Literal, TypeVar

Split = Literal["train", "heldout", "hard_train", "hard"]

_T = TypeVar("_T")
_HE = ("Tom", "Ben", "Sam", "Max", "Leo", "Omar", "Ivan", "Raj", "José", "Jürgen", "Paul", "Kofi")
_SHE = ("Anna", "Mia", "Lucy", "Nina", "Emma", "Sara", "Aiko", "Priya", "Zoë", "Kate", "Ruth")
_PRONOUNS = {**dict.fromkeys(_HE, "he"), **dict.fromkeys(_SHE, "she")}
_ITEMS = (
    *("apples", "pens", "books", "coins", "cards", "stamps", "marbles", "shells", "eggs"),
    *("cookies", "stickers", "buttons", "beads", "lemons", "roses", "tickets", "stones", "cups"),
)
_ADJECTIVES = ("red", "green", "blue", "old", "new", "big", "small")
_PACKS = ("boxes", "bags", "packs", "jars")
_LEADS = ("", "", "Then ", "Later ", "Next ", "After that ")
_GAINS = ("buys {n}", "buys {n} more", "finds {n} more", "gets {n} from {friend}", "wins {n} more")
_LOSSES = ("gives {n} to {friend}", "loses {n}", "sells {n}", "uses {n}", "gives away {n}")
_TIMES = {2: "twice", 3: "three times", 4: "four times", 5: "five times"}

_ANSWER = re.compile(r"Answer:[ \t]*(-?[0-9]{1,18})(?!\w|[.,/]\w)")


@dataclass(frozen=True, kw_only=True)
class WordProblem:
    """One problem with its worked solution.

    Example: ``WordProblem(prompt="Tom has 3 apples and buys 4. How many?",
    solution="3 + 4 = 7. Answer: 7", answer=7, steps=1, split="train")``.
    """

    prompt: str
    """The story and its question, one line, no trailing space."""
    solution: str
    """``a op b = c.`` for each step, then ``Answer: c``, separated by single spaces."""
    answer: int
    """The result of the last step, never negative."""
    steps: int
    """Equations in ``solution``, at least 1."""
    split: Split
    """The split that owns the prompt."""


@dataclass(frozen=True, kw_only=True)
class _Level:
    """Difficulty; every bound is included."""

    steps: tuple[int, int]
    start_max: int
    change_max: int
    packs_max: int
    each_max: int
    total_max: int


_BASE = _Level(steps=(1, 4), start_max=90, change_max=60, packs_max=5, each_max=20, total_max=300)
_HARD = _Level(
    steps=(5, 6), start_max=300, change_max=200, packs_max=50, each_max=50, total_max=2500
)
_BUCKETS = 16
_SPLITS: dict[Split, tuple[_Level, range]] = {
    "train": (_BASE, range(2, _BUCKETS)),
    "heldout": (_BASE, range(0, 1)),
    "hard_train": (_HARD, range(2, _BUCKETS)),
    "hard": (_HARD, range(1, 2)),
}
SPLITS: tuple[Split, ...] = tuple(_SPLITS)


def stream(seed: int, split: Split) -> Iterator[WordProblem]:
    """Endless independent draws of *split*; the same seed gives the same sequence.

    A short problem may come twice. One seed gives unrelated sequences in two splits.
    """
    if split not in _SPLITS:
        raise ValueError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
    level, buckets = _SPLITS[split]
    rng = Random(int.from_bytes(sha256(f"{seed}/{split}".encode()).digest()[:8], "big"))
    while True:
        story = _Story(rng, level)
        prompt = story.prompt()
        if sha256(prompt.encode()).digest()[0] % _BUCKETS in buckets:
            yield WordProblem(
                prompt=prompt,
                solution=f"{' '.join(story.equations)} Answer: {story.total}",
                answer=story.total,
                steps=len(story.equations),
                split=split,
            )


def generate(seed: int, count: int, split: Split) -> list[WordProblem]:
    """The first *count* problems of :func:`stream`; a negative count is a ValueError."""
    return list(islice(stream(seed, split), count))


def parse_answer(text: str) -> int | None:
    """The integer of the last well-formed ``Answer: 7`` in *text*, or None.

    ASCII digits only, at most 18. ``7.`` is well-formed; ``7.5``, ``1,000`` and ``7/2`` are not.
    """
    matches = _ANSWER.findall(text)
    return int(matches[-1]) if matches else None


def reward(problem: WordProblem, text: str) -> float:
    """1.0 if *text*, a completion, states exactly the problem's answer, else 0.0."""
    return 1.0 if parse_answer(text) == problem.answer else 0.0


class _Story:
    """Builds one problem sentence by sentence; ``total`` is what the hero holds by then."""

    def __init__(self, rng: Random, level: _Level) -> None:
        self._rng = rng
        self._level = level
        self._hero, self._friend, self._rival = self._distinct(_HE + _SHE, 3)
        self._pronoun = _PRONOUNS[self._hero]
        self._rival_total: int | None = None
        self._items = self._pick(_ITEMS)
        self._sentences: list[str] = []
        self._joined = False
        self.equations: list[str] = []
        self.total = 0

    def prompt(self) -> str:
        """Writes the whole problem; call once."""
        steps = self._between(*self._level.steps)
        self._start()
        while left := steps - len(self.equations):
            closing = self._closing_step() if left == 1 and self._chance(0.25) else None
            if closing is not None:
                return " ".join([*self._sentences, closing])
            self._event(left)
        return " ".join([*self._sentences, self._plain_question()])

    def _start(self) -> None:
        kind = self._between(0, 5)
        if kind == 0:
            count, each = self._packs()
            held = f"{count} {self._pick(_PACKS)} with {each} {self._items} each"
            self._step(count, "*", each)
        elif kind == 1:
            one, two = self._distinct(_ADJECTIVES, 2)
            first, second = self._amount(self._level.start_max), self._amount(20)
            held = f"{first} {one} {self._items} and {second} {two} {self._items}"
            self._step(first, "+", second)
        elif kind == 2:
            return self._comparison()
        else:
            self.total = self._amount(self._level.start_max)
            held = f"{self.total} {self._items}"
        self._sentences.append(f"{self._hero} has {held}.")

    def _comparison(self) -> None:
        held = self._rival_total = self._amount(self._level.start_max)
        kind, factor = self._between(0, 2), self._between(2, 5)
        if kind == 0 and factor * held <= self._level.total_max:
            self._step(held, "*", factor)
            words = f"{_TIMES[factor]} as many as"
        else:
            fewer = kind == 1 and held > 2
            change = self._amount(held - 1 if fewer else self._level.change_max)
            self._step(held, "-" if fewer else "+", change)
            words = f"{change} {'fewer' if fewer else 'more'} than"
        self._sentences.append(f"{self._rival} has {held} {self._items}.")
        self._sentences.append(f"{self._hero} has {words} {self._rival}.")

    def _event(self, steps: int) -> None:
        """One sentence worth 1 or 2 of the *steps* still to write."""
        kinds = [self._gain, self._gain, self._loss, self._loss, self._multiply, self._divide]
        if steps >= 2:
            kinds += [self._change_by_packs, self._change_by_packs]
        phrase = None
        while phrase is None:
            phrase = self._pick(kinds)()
        if not self._joined and self._chance(0.3):
            self._sentences[-1] = f"{self._sentences[-1][:-1]} and {phrase}."
            self._joined = True
            return
        sentence = f"{self._pick(_LEADS)}{self._pick((self._hero, self._pronoun))} {phrase}."
        self._sentences.append(sentence[0].upper() + sentence[1:])
        self._joined = False

    # Each event writes its equations and returns its words, or None where it does not fit.

    def _gain(self) -> str | None:
        change = self._amount(self._level.change_max)
        if self.total + change > self._level.total_max:
            return None
        self._step(self.total, "+", change)
        return self._pick(_GAINS).format(n=change, friend=self._friend)

    def _loss(self) -> str | None:
        if self.total < 4:
            return None
        change = self._amount(min(self.total - 1, self._level.change_max))
        self._step(self.total, "-", change)
        return self._pick(_LOSSES).format(n=change, friend=self._friend)

    def _multiply(self) -> str | None:
        factor = self._between(2, 5)
        if self.total * factor > self._level.total_max:
            return None
        self._step(self.total, "*", factor)
        return f"ends up with {_TIMES[factor]} as many"

    def _divide(self) -> str | None:
        factor = self._between(2, 5)
        if self.total % factor or self.total < 2 * factor:
            return None
        self._step(self.total, "/", factor)
        return f"splits them evenly into {factor} {self._pick(_PACKS)}, keeping only one of these"

    def _change_by_packs(self) -> str | None:
        before, (count, each), gained = self.total, self._packs(), self._chance(0.5)
        after = before + count * each if gained else before - count * each
        if not 1 <= after <= self._level.total_max:
            return None
        self._step(count, "*", each)
        self._step(before, "+" if gained else "-", self.total)
        if gained:
            return f"buys {count} {self._pick(_PACKS)} with {each} {self._items} each"
        return f"gives {each} to each of {count} friends"

    def _closing_step(self) -> str | None:
        """A question that needs one more step, or None where the story offers none."""
        if self._rival_total is not None:
            if self.total + self._rival_total > self._level.total_max:
                return None
            self._step(self.total, "+", self._rival_total)
            return f"How many {self._items} do {self._hero} and {self._rival} have together?"
        factors = [k for k in range(2, 6) if self.total % k == 0 and self.total >= 2 * k]
        if not factors:
            return None
        factor = self._pick(factors)
        self._sentences.append(f"{self._hero} shares them equally among {factor} friends.")
        self._step(self.total, "/", factor)
        return self._pick(("How many does each get?", f"How many {self._items} does each get?"))

    def _plain_question(self) -> str:
        questions = [
            f"How many {self._items} does {self._hero} have?",
            f"How many {self._items} does {self._pronoun} have now?",
            f"How many does {self._hero} have in the end?",
        ]
        if self._rival_total is None:
            questions += ["How many?", f"How many {self._items} are there?"]
        return self._pick(questions)

    def _step(self, left: int, sign: str, right: int) -> None:
        results = {"+": left + right, "-": left - right, "*": left * right, "/": left // right}
        self.total = results[sign]
        if sign in "+*" and self._chance(0.2):  # so that a problem has several right solutions
            left, right = right, left
        self.equations.append(f"{left} {sign} {right} = {self.total}.")

    def _packs(self) -> tuple[int, int]:
        return self._between(2, self._level.packs_max), self._between(2, self._level.each_max)

    def _between(self, low: int, high: int) -> int:
        """Uniform in [low, high], both included."""
        return low + int(self._rng.random() * (high - low + 1))

    def _amount(self, high: int) -> int:
        """A count in [2, max(2, high)]; small ones are more frequent."""
        return self._between(2, max(2, min(high, self._pick((10, 30, high)))))

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share

    def _pick(self, options: Sequence[_T]) -> _T:
        return options[int(self._rng.random() * len(options))]

    def _distinct(self, options: Sequence[str], count: int) -> list[str]:
        left = list(options)
        return [left.pop(int(self._rng.random() * len(left))) for _ in range(count)]
