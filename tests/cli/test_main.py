"""Streams, exit codes and manifests of commands, run as a person runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pagedctl.cli.main import _wait_politely
from tests.conftest import Cli

HOOK = """
import sys
from pagedctl.cli import main as entry
import types
body = types.ModuleType("fake_body")
exec({body!r}, body.__dict__)
sys.modules["fake_body"] = body
entry.BODIES["env"] = "fake_body:run"
entry.run()
"""


def run_with_body(body: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run ``pagedctl env`` with another body, to see what the frame around it does."""
    return subprocess.run(
        [sys.executable, "-c", HOOK.format(body=body), "env", *words],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=60,
        check=False,
    )


def test_nothing_but_the_result_reaches_stdout(tmp_path: Path) -> None:
    body = (
        "import os, sys\n"
        "def run(session):\n"
        "    print('a library prints'); os.write(1, b'a library writes\\n')\n"
        "    session.show('the result'); session.note('a note')\n"
        "    return 0\n"
    )
    done = run_with_body(body, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.strip() == "the result"
    assert "a library prints" in done.stderr
    assert "a library writes" in done.stderr
    assert "a note" in done.stderr


def test_quiet_drops_tables_and_notes_and_keeps_warnings(tmp_path: Path) -> None:
    body = (
        "def run(session):\n"
        "    session.show('table'); session.note('note'); session.warn('careful')\n"
        "    return 1\n"
    )
    done = run_with_body(body, "--quiet", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "warning: careful\n")


@pytest.mark.parametrize(
    ("raised", "code", "talk"),
    [
        ("KeyboardInterrupt", 130, ""),
        ("ZeroDivisionError('ours')", 70, "Traceback"),
        (
            "__import__('pagedctl.errors').errors.CapacityError("
            "'w', where='x', rule='r', remedy='m')",
            2,
            "error: w\nwhere: x\nrule: r\nremedy: m\n",
        ),
    ],
)
def test_each_end_has_its_exit_code(tmp_path: Path, raised: str, code: int, talk: str) -> None:
    done = run_with_body(f"def run(session):\n    raise {raised}\n", cwd=tmp_path)
    assert done.returncode == code
    assert done.stdout == ""
    assert talk in done.stderr
    assert ("Traceback" in done.stderr) == (code == 70)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
def test_a_signal_closes_the_manifest_as_interrupted(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    body = (
        "import time\n"
        "def run(session):\n"
        "    with session.manifest_builder(reads_only=False):\n"
        "        session.note('ready'); time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", HOOK.format(body=body), "env", "--json", "m.json"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    process.send_signal(number)
    _, talk = process.communicate(timeout=30)
    assert process.returncode == code
    assert talk == ("interrupted\n" if number == signal.SIGINT else "")
    assert json.loads((tmp_path / "m.json").read_bytes())["status"] == "interrupted"


def test_a_failed_run_leaves_a_manifest_with_the_error(tmp_path: Path) -> None:
    body = (
        "from pagedctl.errors import ModelError\n"
        "def run(session):\n"
        "    with session.manifest_builder(reads_only=False):\n"
        "        raise ModelError('w', where='x', rule='r', remedy='m')\n"
    )
    done = run_with_body(body, cwd=tmp_path)
    assert done.returncode == 2
    (path,) = (tmp_path / "pagedctl-runs").glob("*-env-*.json")
    manifest = json.loads(path.read_bytes())
    assert manifest["status"] == "failed"
    assert manifest["error"] == {"what": "w", "where": "x", "rule": "r", "remedy": "m"}


def test_a_reader_that_closes_the_pipe_gets_no_traceback(tmp_path: Path) -> None:
    body = (
        "def run(session):\n"
        "    for _ in range(200000):\n"
        "        session.result.write('line\\n')\n"
        "    return 0\n"
    )
    script = HOOK.format(body=body)
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", script, "env"], stdout=writer, stderr=subprocess.PIPE, cwd=tmp_path
    )
    os.close(writer)
    assert os.read(reader, 4) == b"line"
    os.close(reader)
    _, talk = process.communicate(timeout=60)
    assert talk == b""


def test_env_prints_a_table_and_bare_json_the_same_object(cli: Cli) -> None:
    table = cli("env")
    assert table.returncode == 0
    assert "cpu_capability" in table.stdout
    manifest = json.loads(cli("env", "--json").stdout)
    assert manifest["schema"] == "pagedctl.manifest/1"
    assert manifest["command"] == "env"
    assert manifest["argv"] == ["env", "--json"]
    assert manifest["versions"]["python"] in table.stdout
    names = [one["name"] for one in manifest["metrics"]["capabilities"]]
    assert "torch" in names


def test_env_writes_a_manifest_only_where_it_is_told_to(cli: Cli, tmp_path: Path) -> None:
    assert cli("env").returncode == 0
    assert not (tmp_path / "pagedctl-runs").exists()
    assert cli("env", "--json", "e.json").returncode == 0
    before = (tmp_path / "e.json").read_bytes()
    again = cli("env", "--json", "e.json")
    assert again.returncode == 2
    assert "e.json" in again.stderr
    assert (tmp_path / "e.json").read_bytes() == before


def test_a_broken_plan_is_refused_by_a_command_that_does_not_use_it(
    cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "p.toml").write_text('schema = "pagedctl.plan/1"\nname = "p"\nengine = {tp = 1}\n')
    for words, env in ((("env", "--plan", "p.toml"), {}), (("env",), {"PAGEDCTL_PLAN": "p.toml"})):
        done = cli(*words, env=env)
        assert done.returncode == 2
        assert "where: p.toml, key engine.tp" in done.stderr


def test_no_colour_reaches_a_pipe(cli: Cli) -> None:
    done = cli("env", env={"FORCE_COLOR": "", "NO_COLOR": ""})
    assert "\x1b[" not in done.stdout + done.stderr


def test_version_names_the_tool(cli: Cli) -> None:
    done = cli("--version")
    assert done.returncode == 0
    assert done.stdout.split()[0] == "pagedctl"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"}),
    ],
)
def test_barriers_do_not_spin_long_unless_the_user_says_so(
    given: dict[str, str], kept: dict[str, str]
) -> None:
    environ = dict(given)
    _wait_politely(environ)
    assert environ == kept


def test_a_command_sees_the_environment_as_the_caller_set_it() -> None:
    body = "def run(session):\n    session.show(str('GOMP_SPINCOUNT' in session.environ))\n"
    environ = {name: text for name, text in os.environ.items() if name != "GOMP_SPINCOUNT"}
    done = subprocess.run(
        [sys.executable, "-c", HOOK.format(body=body + "    return 0\n"), "env"],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize("words", [(), ("models",)])
def test_a_bare_word_shows_its_help(cli: Cli, words: tuple[str, ...]) -> None:
    done = cli(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Usage: {' '.join(['pagedctl', *words])} " in done.stdout


def test_a_dash_as_the_manifests_path_is_stdout(cli: Cli, tmp_path: Path) -> None:
    done = cli("env", "--json", "-")
    assert json.loads(done.stdout)["argv"] == ["env", "--json", "-"]
    assert not (tmp_path / "-").exists()


def test_a_plan_on_stdin_is_refused(cli: Cli) -> None:
    for words, env in ((("env", "--plan", "-"), {}), (("env",), {"PAGEDCTL_PLAN": "-"})):
        done = cli(*words, env=env, stdin="")
        assert done.returncode == 2
        assert done.stderr.startswith("error: a plan cannot come from stdin\n")


def test_brackets_and_colons_are_no_markup(tmp_path: Path) -> None:
    text = "[red]a[/red] :smile: [/]"
    body = (
        "from rich.table import Table\n"
        "def run(session):\n"
        f"    text = {text!r}\n"
        "    session.note(text); session.warn(text); session.show(text)\n"
        "    table = Table(); table.add_column(text); table.add_row(text); session.show(table)\n"
        "    return 0\n"
    )
    done = run_with_body(body, cwd=tmp_path)
    assert done.stderr == f"{text}\nwarning: {text}\n"
    assert done.stdout.count(text) == 3


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (("--json", "/proc/m.json"), {}),
        ((), {"PAGEDCTL_RUNS_DIR": "/proc/runs"}),
        (("--json", "m" * 300), {}),
    ],
)
def test_a_manifest_that_could_not_be_written_is_refused_before_any_work(
    cli: Cli, words: tuple[str, ...], env: dict[str, str]
) -> None:
    done = cli("bench", *words, env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: cannot write ")
