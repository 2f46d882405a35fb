"""Make build/tree: every module at the place it is imported from, as symbolic links to the sources.

`checks/` and `kernels/` stand at the repository's root but are imported as `specdoctor.checks` and `specdoctor.kernels`
(pyproject.toml, `package-dir`). An editable install maps the names at run time; tools that read files, such as mypy and
import-linter, need real places. Links, so a message that is followed leads to the source.

Usage: python tools/link_tree.py. The tree is made anew each time.
"""

import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / "build" / "tree"


def link_tree() -> None:
    """Fill TREE by the `package-dir` table: the folder of each package, below it a link for each file."""
    shutil.rmtree(TREE, ignore_errors=True)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    for package, source in settings["tool"]["setuptools"]["package-dir"].items():
        for file in sorted((ROOT / source).rglob("*")):
            if file.is_dir() or "__pycache__" in file.parts:
                continue
            link = TREE.joinpath(*package.split("."), file.relative_to(ROOT / source))
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    (TREE / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")  # the tools look for their settings where they start


if __name__ == "__main__":
    link_tree()
