"""The result of a proof as a JUnit file: one test case per case of the proof."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from pagedctl.verify.case_result import CaseResult
from pagedctl.verify.invariance_result import InvarianceResult

SUITE = "pagedctl invariance"
CLASS_NAME = "pagedctl.invariance"
POWER = "power"
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML file may hold."""


def junit_xml(result: InvarianceResult, *, repeat: str | None) -> bytes:
    """The file's bytes. A case that differs fails, one without power is an error, and one that
    did not run is skipped with its reason; so is the power of the proof, as a case of its own.

    *repeat* is the command that repeats the first failure.
    """
    suite = ElementTree.Element("testsuite", name=SUITE)
    for one in result.cases:
        _add(suite, one.name, one.wall_s, *_standing(one, result, repeat))
    missed = [one for one in result.faults if not one.caught]
    told = [*(f"{one.name}: {one.sentence()}" for one in missed), *result.idle]
    _add(suite, POWER, 0.0, "error" if told else None, "\n".join(told))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(suite)))
    suite.set("time", f"{result.wall_s:.3f}")
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    data: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return data + b"\n"


def _standing(
    case: CaseResult, result: InvarianceResult, repeat: str | None
) -> tuple[str | None, str]:
    """(tag, text) of what is not a pass."""
    if case.not_run is not None:
        return "skipped", case.not_run
    if case.divergences:
        told = [case.text(), *(one.sentence() for one in case.divergences)]
        if result.first in case.divergences:
            told += [result.located.sentence()] if result.located else []
            told += [f"repeat: {repeat}"] if repeat else []
        return "failure", "\n".join(told)
    return ("error", "\n".join(case.lacks)) if case.lacks else (None, "")


def _add(suite: ElementTree.Element, name: str, wall_s: float, tag: str | None, text: str) -> None:
    case = ElementTree.SubElement(
        suite, "testcase", classname=CLASS_NAME, name=name, time=f"{wall_s:.3f}"
    )
    if tag is not None:
        clean = _NOT_XML.sub("?", text)
        ElementTree.SubElement(case, tag, message=clean.partition("\n")[0]).text = clean
