"""Options that the surface reserves for a later version."""

from __future__ import annotations

from pagedctl.cli.session import Session
from pagedctl.config.loader import FLAG, flag_of
from pagedctl.errors import ConfigError, Fault


def refuse_reserved(session: Session, *names: str) -> None:
    """Refuse those of the options *names* that were asked for, rather than ignore them."""
    asked = [name for name in names if session[name] not in (None, False)]
    if asked:
        raise ConfigError.of(_fault(name, session.options.origins[name]) for name in asked)


def _fault(name: str, origin: str) -> Fault:
    return Fault(
        what=f"{flag_of(name)} is not available in this version",
        where="command line" if origin == FLAG else f"{origin}, key {name}",
        rule="the option is reserved for a later version",
        remedy="leave it out",
    )
