"""`pic doctor`: the examination, a verdict a line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Optional

from pictool.commands.console.errors import of_command_line
from pictool.commands.console.outputs import print_json
from pictool.commands.console.verbosity import waiting
from pictool.commands.settings.options import POLICY, SPECS, JsonOption, command, make_app, option
from pictool.commands.settings.resources import quiet_libraries
from pictool.commands.settings.settings import Settings
from pictool.escapes import visible

if TYPE_CHECKING:
    from pictool.doctor.verdict import Verdict

app = make_app()


@command(app, "doctor", "model", "device", "dtype", "store")
def run_doctor(
    settings: Settings,
    algo: Annotated[Optional[list[str]], option("--algo", "SPEC", f"Policy: {SPECS}", POLICY)] = None,
    as_json: JsonOption = False,
) -> None:
    """Check that linking is exact with this model and device.

    Looks at what is installed, checks the exactness rules against transformers itself, and compares linked answers with
    those of full recompute. Ends with exit code 1 if anything failed.

    \b
      pic doctor
      pic doctor -m ~/models/llama --device cuda --json
    """
    from pictool.linker.grid import parse_repeatable
    from pictool.runtime.model import require_name

    with of_command_line():
        parse_repeatable(algo or ())
    require_name(settings.model)
    with waiting("loading transformers"):
        quiet_libraries()
        from pictool.doctor.examine import POLICIES, Examination, examine

    examination = Examination(settings.model, settings.device, settings.dtype, settings.store, algo or POLICIES)
    report = examine(examination, (lambda _: None) if as_json else _Printer().print)
    if as_json:
        print_json(report.report())
    if not report.is_good:
        sys.exit(1)


class _Printer:
    """Prints verdicts as they are made, each section after its heading."""

    def __init__(self) -> None:
        self._section = ""

    def print(self, verdict: Verdict) -> None:
        if verdict.section != self._section:
            print(verdict.section if not self._section else f"\n{verdict.section}")
            self._section = verdict.section
        print(visible(f"  {verdict.status:<8} {verdict.check}: {verdict.text}"), flush=True)
