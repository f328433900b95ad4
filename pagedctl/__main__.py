"""``python -m pagedctl``."""

from pagedctl.cli.main import run

run()
