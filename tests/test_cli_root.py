"""The root command: what `--help` shows and does not import, global flags, error lines and exit codes."""

import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

import pytest
import typer
from typer.testing import CliRunner

from specdoctor import __version__
from specdoctor.cli import app as root_module
from specdoctor.cli.app import COMMANDS, Entry, app
from specdoctor.errors import EnvironmentMissingError, ExitCode, SpecdoctorError

PANELS = ["Diagnose", "Measure", "Build", "Use"]
HEAVY = {"torch", "transformers", "numpy", "pandas", "scipy", "matplotlib", "huggingface_hub", "tokenizers", "jinja2"}
# Typer imports pydantic itself to read the options of a command; the root's help must do without.
ROOT_ONLY = {"pydantic", "yaml"}

# Runs the command line as the `specdoctor` script does, then names the modules that were loaded on the way.
PROBE = """
import sys
from specdoctor.cli.app import main
try:
    main()
finally:
    print("loaded:", *sorted({name.partition(".")[0] for name in sys.modules}), file=sys.stderr)
"""


def run_cli(*args: str, cwd: Path, program: tuple[str, ...] = ("-m", "specdoctor")) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own: 100 columns, no colour."""
    environment = os.environ | {"COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, *program, *args], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


def loaded_modules(*args: str, cwd: Path) -> tuple[str, set[str]]:
    done = run_cli(*args, cwd=cwd, program=("-c", PROBE))
    assert done.returncode == 0, done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("loaded: ")
    return done.stdout, set(line.split()[1:])


class TestHelp:
    def test_every_command_stands_in_its_panel(self, tmp_path: Path) -> None:
        lines = run_cli("--help", cwd=tmp_path).stdout.splitlines()
        found: dict[str, str] = {}
        panel = ""
        for line in lines:
            words = line.strip("│╭╮╰╯─ ").split()
            if line.startswith("╭"):
                panel = words[0]
            elif line.startswith("│") and words and words[0] in COMMANDS:
                found[words[0]] = panel
        assert found == {name: entry.panel for name, entry in COMMANDS.items()}

    def test_panels_are_the_known_ones_in_order(self, tmp_path: Path) -> None:
        output = run_cli("--help", cwd=tmp_path).stdout
        shown = [line.strip("╭╮─ ") for line in output.splitlines() if line.startswith("╭")]
        assert shown == ["Options"] + [p for p in PANELS if p in {entry.panel for entry in COMMANDS.values()}]

    def test_root_help_loads_nothing_heavy(self, tmp_path: Path) -> None:
        _, loaded = loaded_modules("--help", cwd=tmp_path)
        assert "typer" in loaded
        assert not loaded & (HEAVY | ROOT_ONLY)
        assert not [name for name in loaded if name == "click"]

    @pytest.mark.parametrize("command", COMMANDS)
    def test_command_help_loads_nothing_heavy(self, command: str, tmp_path: Path) -> None:
        output, loaded = loaded_modules(command, "--help", cwd=tmp_path)
        assert f" {command} " in output.splitlines()[1]
        assert "--install-completion" not in output
        assert not loaded & HEAVY

    def test_the_probe_sees_a_heavy_module(self, tmp_path: Path) -> None:
        """Negative control: `env` does load torch."""
        _, loaded = loaded_modules("env", "--json", "-", cwd=tmp_path)
        assert loaded & HEAVY >= {"torch"}

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_offers_json(self, command: str, tmp_path: Path) -> None:
        shown = run_cli(command, "--help", cwd=tmp_path).stdout
        parts = re.findall(r"^│ ([a-z-]+) ", shown.split(" Commands ", 1)[1], re.M) if " Commands " in shown else []
        for words in [[command, part] for part in parts] if "--json" not in shown else [[command]]:
            assert "--json" in run_cli(*words, "--help", cwd=tmp_path).stdout, words

    def test_no_arguments_is_help_and_a_usage_error(self, tmp_path: Path) -> None:
        done = run_cli(cwd=tmp_path)
        assert done.returncode == ExitCode.USAGE
        assert "Usage: " in done.stdout + done.stderr


class TestUsage:
    def test_version(self) -> None:
        result = CliRunner().invoke(app, ["--version"])
        assert (result.exit_code, result.stdout) == (0, f"specdoctor {__version__}\n")
        assert version("specdoctor") == __version__

    def test_unknown_command_names_the_near_misses(self, tmp_path: Path) -> None:
        done = run_cli("bnch", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
        assert "'bnch'. Did you mean 'bench'?" in done.stderr

    def test_unknown_option_of_a_command_names_the_near_misses(self, tmp_path: Path) -> None:
        done = run_cli("bench", "--taget", "x", cwd=tmp_path)
        assert (done.returncode, done.stdout) == (ExitCode.USAGE, "")
        assert "--target" in done.stderr

    def test_a_word_after_two_dashes_is_no_flag(self, made_command: Callable[..., list[str]]) -> None:
        seen = made_command(lambda: None)
        CliRunner().invoke(app, ["made", "--", "--debug"])
        assert seen == ["--debug"]


@pytest.fixture
def made_command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """A command `made [WORD]` that keeps the word and then calls what it is given."""

    def make(action: Callable[[], object]) -> list[str]:
        words: list[str] = []
        sub_app = typer.Typer()

        @sub_app.command()
        def made(word: str = typer.Argument("")) -> None:
            words.append(word)
            action()

        module = types.ModuleType("specdoctor.cli.made")
        module.app = sub_app  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(COMMANDS, "made", Entry("made", "Use", "Made for a test."))
        return words

    return make


class TestGlobalFlags:
    NAMES = ("SPECDOCTOR_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "SPECDOCTOR_HOME")

    @pytest.fixture
    def seen(self, made_command: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
        """The variables as the command found them."""
        for name in self.NAMES:
            monkeypatch.setenv(name, "")  # so that the value from before is put back at the end
            monkeypatch.delenv(name)
        values: dict[str, str | None] = {}
        made_command(lambda: values.update({name: os.environ.get(name) for name in self.NAMES}))
        return values

    @pytest.mark.parametrize("line", ["--offline made", "made --offline", "made word --offline"])
    def test_offline(self, line: str, seen: dict[str, str | None]) -> None:
        assert CliRunner().invoke(app, line.split()).exit_code == 0
        assert seen == dict.fromkeys(self.NAMES[:3], "1") | {"SPECDOCTOR_HOME": None}

    @pytest.mark.parametrize("line", ["--cache-dir C made", "made --cache-dir C", "made --cache-dir=C word"])
    def test_cache_dir(self, line: str, seen: dict[str, str | None]) -> None:
        assert CliRunner().invoke(app, line.split()).exit_code == 0
        assert seen == dict.fromkeys(self.NAMES[:3]) | {"SPECDOCTOR_HOME": "C"}

    def test_without_flags_nothing_is_set(self, seen: dict[str, str | None]) -> None:
        assert CliRunner().invoke(app, ["made"]).exit_code == 0
        assert seen == dict.fromkeys(self.NAMES)

    def test_cache_dir_without_a_value_is_a_usage_error(self, seen: dict[str, str | None]) -> None:
        assert CliRunner().invoke(app, ["made", "--cache-dir"]).exit_code == ExitCode.USAGE
        assert seen == {}


def raising(error: BaseException) -> Callable[[], NoReturn]:
    def action() -> NoReturn:
        raise error

    return action


ERRORS = [
    (SpecdoctorError("a.json: key k is 1, expected 2"), ExitCode.USAGE, "a.json: key k is 1, expected 2"),
    (EnvironmentMissingError("no model"), ExitCode.ENVIRONMENT, "no model"),
    (SpecdoctorError("no prompts", ExitCode.NOTHING), ExitCode.NOTHING, "no prompts"),
    (OSError(28, "No space left on device", "out.json"), ExitCode.ENVIRONMENT, "No space left on device: out.json"),
    (KeyboardInterrupt(), ExitCode.INTERRUPTED, "interrupted"),
    (
        ZeroDivisionError("division by zero"),
        ExitCode.INTERNAL,
        "internal error: ZeroDivisionError: division by zero (a bug in specdoctor; run again with --debug)",
    ),
]


@pytest.mark.parametrize(("error", "code", "line"), ERRORS, ids=[type(error).__name__ for error, _, _ in ERRORS])
def test_an_error_is_one_line_on_stderr_and_its_exit_code(
    error: BaseException, code: ExitCode, line: str, made_command: Callable[..., list[str]]
) -> None:
    made_command(raising(error))
    result = CliRunner().invoke(app, ["made"])
    assert (result.exit_code, result.stdout, result.stderr) == (code, "", f"specdoctor: {line}\n")


@pytest.mark.parametrize("words", [["made", "--debug"], ["--debug", "made"]], ids=["after", "before"])
@pytest.mark.parametrize(
    "error", [error for error, _, _ in ERRORS if isinstance(error, Exception)], ids=lambda error: type(error).__name__
)
def test_debug_lets_the_error_through(
    error: Exception, words: list[str], made_command: Callable[..., list[str]]
) -> None:
    made_command(raising(error))
    result = CliRunner().invoke(app, words)
    assert result.exception is error
    assert result.stderr == ""


def test_a_real_failure_has_no_traceback_without_debug(tmp_path: Path) -> None:
    missing = str(tmp_path / "no-model")
    plain, debug = (run_cli("fetch", missing, *more, cwd=tmp_path) for more in ([], ["--debug"]))
    assert (plain.returncode, plain.stdout) == (ExitCode.USAGE, "")
    assert plain.stderr.startswith(f"specdoctor: {missing}: ") and plain.stderr.count("\n") == 1
    assert debug.returncode != 0 and "Traceback" in debug.stderr


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_a_real_interrupt_ends_with_130(tmp_path: Path) -> None:
    waits = (
        # A shell's background job ignores SIGINT, and its children inherit that.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "import time, specdoctor.checks.registry as r; r.family = lambda _: (print('go', flush=True), time.sleep(60))"
    )
    code = f"{waits}; from specdoctor.cli.app import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, "rule"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "go\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=120)
    assert (process.returncode, stderr) == (ExitCode.INTERRUPTED, "specdoctor: interrupted\n")


def test_a_closed_pipe_prints_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -m specdoctor rule SD101 | true"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stderr == ""


def test_the_epilog_names_every_exit_code() -> None:
    epilog = root_module.app.info.epilog
    assert isinstance(epilog, str)
    assert all(f"{int(code)} " in epilog for code in ExitCode)
