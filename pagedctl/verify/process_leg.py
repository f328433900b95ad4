"""Runs legs in a process of its own: ``python -m pagedctl.verify.process_leg JOB RESULT``.

Nothing passes between the two but a job file and a result file.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from pagedctl.config.engine_config import EngineConfig
from pagedctl.engine.engine import Engine
from pagedctl.errors import PagedctlError
from pagedctl.manifest import strict_json
from pagedctl.verify.leg_json import (
    config_from_json,
    config_to_json,
    leg_from_json,
    leg_to_json,
    trace_from_json,
    trace_to_json,
)
from pagedctl.verify.legs import Engines, Leg, LegTrace

HASH_SEED = "PYTHONHASHSEED"
MODULE = "pagedctl.verify.process_leg"


def traces_of_process(
    config: EngineConfig, legs: Sequence[Leg], *, number: int, environ: Mapping[str, str]
) -> list[LegTrace]:
    """The traces of *legs* in process *number*, counted from 2, whose hashes are other ones.

    It loads the model again. Raises PagedctlError if it fails.
    """
    with TemporaryDirectory(prefix="pagedctl-") as folder:
        job, result = Path(folder) / "job.json", Path(folder) / "result.json"
        job.write_bytes(
            strict_json.dumps(
                {"config": config_to_json(config), "legs": [leg_to_json(leg) for leg in legs]}
            )
        )
        done = subprocess.run(
            [sys.executable, "-m", MODULE, str(job), str(result)],
            env={**environ, HASH_SEED: _other_hash_seed(environ, number)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise _failed(number, done)
        found = strict_json.loads(result.read_bytes(), where=str(result))
    assert isinstance(found, dict)
    return [trace_from_json(one) for one in found["traces"]]


def run_job(job: Path, result: Path) -> None:
    """Run the legs of the job file and write their traces."""
    found = strict_json.loads(job.read_bytes(), where=str(job))
    assert isinstance(found, dict)
    legs = [leg_from_json(one) for one in found["legs"]]
    with Engine(config_from_json(found["config"]), needs_record=False) as engine:
        traces = [trace_to_json(trace) for _, trace in Engines(engine).traces(legs)]
    result.write_bytes(strict_json.dumps({"traces": traces}))


def main(words: Sequence[str]) -> int:
    """The child: 0, or 2 with the refusal on stderr."""
    try:
        run_job(Path(words[0]), Path(words[1]))
    except PagedctlError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        return 2
    return 0


def _other_hash_seed(environ: Mapping[str, str], number: int) -> str:
    """One that neither this process nor another child has."""
    taken = environ.get(HASH_SEED)
    return str(number) if taken != str(number) else str(1_000_000 + number)


def _failed(number: int, done: subprocess.CompletedProcess[str]) -> PagedctlError:
    said = done.stderr.strip().splitlines() or ["no message"]
    message = next((line for line in said if line.startswith("error: ")), said[-1])
    return PagedctlError(
        f"process {number} ended with code {done.returncode}: {message}",
        where="case process",
        rule="the same requests are served in another process, which loads the model again",
        remedy="see that memory holds the model twice, or give --processes 1",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
