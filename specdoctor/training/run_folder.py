"""The folder of a training run: state to go on from, log, TensorBoard scalars, the drafter.

Contract: `state.pt` is replaced in one rename, so a kill at any moment leaves the last whole state; a resumed run drops
what the log says beyond it. `drafter/` is a whole checkpoint or absent.

    recipe.yaml   as it was read, defaults filled in        log.jsonl      one line every `log_every` steps
    state.pt      module, optimiser, place in the data      tensorboard/   the same numbers, if TensorBoard is there
    drafter/      in a public format                        held-out/      the target's answers to held-out prompts
"""

import contextlib
import filecmp
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout

from specdoctor.errors import SpecdoctorError
from specdoctor.formats.drafts.calibration_file import CALIBRATION
from specdoctor.training.recipe import Recipe

STATE, LOG, RECIPE, DRAFTER = "state.pt", "log.jsonl", "recipe.yaml", "drafter"
FORMAT = 1
# What may change between a run and its resumption.
FREE = ("output", "length", "held_out", "log_every", "save_every", "device")


class RunFolder:
    """Opened by the process that writes; `close` it."""

    def __init__(self, path: Path, recipe: Recipe, resume: bool) -> None:
        """Raises `SpecdoctorError` when a run is there already (`resume` goes on with it) or at work."""
        self.path, self.recipe, self._made = path, recipe, not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(path / ".lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise SpecdoctorError(f"{path}: another run is at work there; give another output") from None
        if not resume and ((path / STATE).exists() or (path / DRAFTER).exists()):
            self._lock.release()
            raise SpecdoctorError(f"{path}: holds a run already; go on with --resume, or give another output")
        for left in (*path.glob(f".{DRAFTER}*"), *path.glob(f".{STATE}*")):  # of a run that was killed
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        self._board: Any = None
        self._log: Any = None

    @staticmethod
    def read(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
        """The last state, None if there is none. Raises `SpecdoctorError` when it is of another recipe."""
        path = folder / STATE
        if not path.is_file():
            return None
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever pickle and zip make of a broken file
            reason = (str(error).splitlines() or [""])[0]
            raise SpecdoctorError(f"{path}: cannot be read ({reason}); give another output and start again") from None
        if state.get("format") != FORMAT:
            raise SpecdoctorError(f"{path}: format {state.get('format')}, expected {FORMAT}; start again elsewhere")
        recipes = json.loads(state["recipe"]), recipe.model_dump(mode="json")
        before, now = ({key: value for key, value in one.items() if key not in FREE} for one in recipes)
        changed = _changes(before, now)
        if changed:
            raise SpecdoctorError(
                f"{path}: {'; '.join(changed)}; resume with the same ({', '.join(FREE)} may change), or give another "
                "output"
            )
        return state

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the state, in one step."""
        unfinished = self.path / f".{STATE}"
        with unfinished.open("wb") as file:
            torch.save({"format": FORMAT, "recipe": self.recipe.model_dump_json(), **state}, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.path / STATE)

    def begin(self, step: int) -> None:
        """Open the logs behind `step`."""
        text = yaml.safe_dump(self.recipe.model_dump(mode="json", exclude_none=True), sort_keys=False)
        (self.path / RECIPE).write_text(text, encoding="utf-8")
        path = self.path / LOG
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= step]
        unfinished = path.with_name(f".{LOG}")
        unfinished.write_text("".join(kept), encoding="utf-8")
        unfinished.replace(path)
        self._log = path.open("a", encoding="utf-8")
        self._board = _tensorboard(self.path / "tensorboard", step)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """A line of the log, and scalars of its numbers."""
        line = {key: _jsonable(value) for key, value in {"step": step, **values}.items()}
        self._log.write(json.dumps(line) + "\n")
        self._log.flush()
        if self._board is not None:
            for key, value in values.items():
                if isinstance(value, float) and math.isfinite(value):
                    self._board.add_scalar(_tag(key), value, step)

    def put_drafter(self, save: Callable[[Path], None]) -> Path:
        """Write the drafter by `save`, then put it in the place of the one before.

        A calibration of the one before stays where the weights have stayed.
        """
        final, fresh, old = self.path / DRAFTER, self.path / f".{DRAFTER}-new", self.path / f".{DRAFTER}-old"
        save(fresh)
        calibration, weights = final / CALIBRATION, "model.safetensors"
        if calibration.is_file() and filecmp.cmp(final / weights, fresh / weights, shallow=False):
            shutil.copyfile(calibration, fresh / CALIBRATION)
        if final.exists():
            final.rename(old)
        fresh.rename(final)
        shutil.rmtree(old, ignore_errors=True)
        return final

    def close(self) -> None:
        """Close the logs and let others in. A folder made for a run that was refused goes away again."""
        for part in (self._log, self._board):
            if part is not None:
                part.close()
        lock = Path(self._lock.lock_file)
        unused = self._made and list(self.path.iterdir()) == [lock]
        if unused:
            lock.unlink()
        self._lock.release()
        if unused:
            with contextlib.suppress(OSError):  # another run has come meanwhile
                self.path.rmdir()


def _changes(before: Mapping[str, Any], now: Mapping[str, Any], section: str = "") -> list[str]:
    """A phrase for each key, with its section's name before it, whose value is another one."""
    found = []
    for key in now:
        was, has = before.get(key), now.get(key)
        if isinstance(was, dict) and isinstance(has, dict):
            found += _changes(was, has, f"{section}{key}.")
        elif was != has:
            found.append(f"{section}{key} was {was}, the recipe has {has}")
    return found


def _whole_lines(path: Path) -> list[str]:
    """Lines of the log; a kill may have left half a line at the end."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("}\n")]


def _tensorboard(folder: Path, step: int) -> Any:
    """A writer, None where TensorBoard is not installed: the log has the same numbers."""
    with contextlib.suppress(ImportError):
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder), purge_step=step + 1)
    return None


def _tag(key: str) -> str:
    group = key.split("_")[0]
    return f"{group}/{key}" if group in ("match", "accept", "tau") else f"train/{key}"


def _jsonable(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
