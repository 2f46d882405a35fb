"""Exit codes and the one exception that a user is meant to see.

Contract: whoever meets bad input raises `SpecdoctorError` with one line that names the file, the key, the value found,
the value expected and what to do. The command line prints that line and exits with the error's code; a traceback
appears only with `--debug`.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes, the same for every command."""

    OK = 0  # clean, or a gate that passes
    FINDINGS = 1  # findings, or a regression
    USAGE = 2  # bad arguments or bad input files
    INTERNAL = 3  # a bug in specdoctor, or a check that crashed
    ENVIRONMENT = 4  # this machine cannot do it: no model, no device, off-line miss
    NOTHING = 5  # nothing to do, no samples
    INCONCLUSIVE = 6  # not enough samples for a verdict
    INTERRUPTED = 130  # stopped by Ctrl-C, partial results kept


class SpecdoctorError(Exception):
    """One clear line for the user, and the exit code that goes with it."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EnvironmentMissingError(SpecdoctorError):
    """This machine cannot do what was asked (exit code 4)."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.ENVIRONMENT)
