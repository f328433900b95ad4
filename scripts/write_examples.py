"""Write examples/word_problems.jsonl: 64 request lines for the embedded model.

Usage: python scripts/write_examples.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pagedctl.rollout.word_problems import generate

PATH = Path(__file__).resolve().parent.parent / "examples" / "word_problems.jsonl"
SEED = 1


def lines() -> str:
    """Half from the held-out split, half from the hard one; the answer goes into the metadata."""
    problems = [("heldout", one) for one in generate(SEED, 32, "heldout")]
    problems += [("hard", one) for one in generate(SEED, 32, "hard")]
    requests = [
        {
            "id": f"{split}-{number % 32}",
            "prompt": problem.prompt,
            "max_tokens": 192,
            "metadata": {"answer": problem.answer, "split": split},
        }
        for number, (split, problem) in enumerate(problems)
    ]
    return "".join(json.dumps(request) + "\n" for request in requests)


def main() -> int:
    text = lines()
    if "--check" in sys.argv[1:]:
        current = PATH.exists() and PATH.read_text(encoding="utf-8") == text
        if not current:
            print("stale: examples/word_problems.jsonl; run python scripts/write_examples.py")
        return 0 if current else 1
    PATH.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
