"""Reading the result files of other tools, leniently: what they lack is null, never 0.

A file holds one run, or several one after another (``--append-result``, JSON lines). Each is
kept whole beside what was read of it; keys that are not known here are only kept.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pagedctl.errors import ConfigError, Fault
from pagedctl.manifest import lenient_json, strict_json
from pagedctl.manifest.peer_formats import FORMATS, PeerFormat
from pagedctl.manifest.peer_object import PeerObject
from pagedctl.manifest.peer_result import PeerResult
from pagedctl.manifest.schema import Imported


def read_peer_file(path: Path) -> tuple[PeerResult, ...]:
    """Every run in the file at *path*, in order, of which there is at least one.

    Raises ConfigError with every fault of the file: what is no JSON, no result of a known tool,
    or ill-typed under a known key.
    """
    data = _read_bytes(path)
    found = lenient_json.read_values(data, where=str(path))
    if not found:
        raise ConfigError.of([_no_result("the file is empty", str(path))])
    sha256 = hashlib.sha256(data).hexdigest()
    faults: list[Fault] = []
    results = [_result(one, path, sha256, faults) for one in found]
    if faults:
        raise ConfigError.of(faults)
    return tuple(one for one in results if one is not None)


def _result(
    found: lenient_json.Value, path: Path, sha256: str, faults: list[Fault]
) -> PeerResult | None:
    """The run that *found* holds; None, or what could be read, after adding to *faults*."""
    where = f"{path}, line {found.line}"
    if not isinstance(found.value, dict):
        faults.append(_no_result("the file holds a value that is no object", where))
        return None
    fitting = [one for one in FORMATS if one.fits(found.value)]
    if len(fitting) != 1:
        faults.append(_no_result(_unknown(fitting), where))
        return None
    (form,) = fitting
    source = PeerObject(found.value, where, faults)
    result = PeerResult(
        imported=Imported(
            tool=form.tool,
            version=form.version(source),
            path=str(path),
            sha256=sha256,
            object=found.value,
        ),
        line=found.line,
        metrics=form.metrics(source),
        model=form.model(source),
        request_rate=source.request_rate(),
        differs=form.differs,
    )
    _check_can_be_written(result, where, faults)
    return result


def _check_can_be_written(result: PeerResult, where: str, faults: list[Fault]) -> None:
    """What was read can be kept: refused here, not when a manifest is written."""
    try:
        strict_json.dumps(result.manifest_sections())
    except ValueError as error:
        fault = Fault(
            what=f"the result cannot be kept in a manifest: {error}",
            where=where,
            rule=f"at most {strict_json.MAX_DEPTH} levels, and keys that UTF-8 tells apart",
            remedy="name the file as the tool wrote it",
        )
        faults.append(fault)


def _unknown(fitting: list[PeerFormat]) -> str:
    if fitting:
        return f"the object has keys of {' and of '.join(one.tool for one in fitting)}"
    return "the object is no result of a tool that is known here"


def _no_result(what: str, where: str) -> Fault:
    formats = "; ".join(
        f"{one.tool} ({', '.join(one.keys)}, and one of {', '.join(one.marks)})" for one in FORMATS
    )
    return Fault(
        what=what,
        where=where,
        rule=f"a result of one of: {formats}",
        remedy="name the file that the tool wrote, as it wrote it",
    )


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}",
            where=str(path),
            rule="a result is a readable file",
            remedy="check the path and its permissions",
        ) from error
