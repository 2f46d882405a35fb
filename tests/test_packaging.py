"""What is shipped: packages, data, dependencies; the link tree for the linters; the names that stay free."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

from specdoctor import __version__

ROOT = Path(__file__).parents[1]
NOT_SHIPPED = {"__pycache__"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(scope="module")
def package_dir(project: dict[str, Any]) -> dict[str, str]:
    """Package name to folder, the longest folder of the four roots."""
    return project["tool"]["setuptools"]["package-dir"]


def sources(package_dir: dict[str, str], pattern: str = "*") -> Iterator[tuple[str, Path]]:
    """Every file to ship: its place in the wheel and the file."""
    for package, folder in package_dir.items():
        for file in sorted((ROOT / folder).rglob(pattern)):
            if file.is_file() and not NOT_SHIPPED & set(file.parts):
                yield f"{package.replace('.', '/')}/{file.relative_to(ROOT / folder).as_posix()}", file


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required(project: dict[str, Any]) -> set[str]:
    """What the package depends on, its optional groups included; those for developers not."""
    groups = project["project"]["optional-dependencies"]
    lines = project["project"]["dependencies"] + [line for name in groups.keys() - {"dev"} for line in groups[name]]
    return {normal(re.match(r"[\w.-]+", line)[0]) for line in lines}  # type: ignore[index]


def test_every_package_is_listed(project: dict[str, Any], package_dir: dict[str, str]) -> None:
    found = {place.rpartition("/")[0].replace("/", ".") for place, _ in sources(package_dir, "__init__.py")}
    assert set(project["tool"]["setuptools"]["packages"]) == found


def test_every_python_file_is_in_a_package(project: dict[str, Any], package_dir: dict[str, str]) -> None:
    listed = set(project["tool"]["setuptools"]["packages"])
    stray = [
        place for place, _ in sources(package_dir, "*.py") if place.rpartition("/")[0].replace("/", ".") not in listed
    ]
    assert stray == []


def test_every_import_is_a_declared_dependency(project: dict[str, Any], package_dir: dict[str, str]) -> None:
    """What comes with a dependency of a dependency today may be gone tomorrow."""
    distributions = packages_distributions()
    undeclared: dict[str, str] = {}
    for place, file in sources(package_dir, "*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for top in {module.partition(".")[0] for module in modules} - sys.stdlib_module_names - {"specdoctor"}:
                if not {normal(name) for name in distributions.get(top, [top])} & required(project):
                    undeclared[top] = place
    assert undeclared == {}


def test_the_constraints_pin_every_direct_dependency(project: dict[str, Any]) -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    wanted = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["dev"]
    names = {normal(re.match(r"[\w.-]+", line)[0]) for line in wanted}
    assert names - {normal(name) for name in pins} == set()
    assert "+" not in pins["torch"]  # a local version such as +cpu cannot be had from an index


def test_nobody_imports_the_root_folders_by_their_bare_names() -> None:
    for file in [*ROOT.glob("specdoctor/**/*.py"), *ROOT.glob("checks/*.py"), *ROOT.glob("kernels/*.py")]:
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"checks", "kernels", "sample_configs"}, file


@pytest.mark.parametrize("place", ["the repository", "elsewhere"])
def test_the_name_kernels_is_never_ours(place: str, tmp_path: Path) -> None:
    """transformers probes `kernels`; an installed specdoctor must not answer."""
    cwd = ROOT if place == "the repository" else tmp_path
    code = "from importlib.util import find_spec; print(find_spec('kernels'))"
    # -P: the script's folder stays off the path, as for the `specdoctor` command and for pytest in importlib mode.
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=cwd, capture_output=True, text=True, check=True)
    assert str(ROOT) not in done.stdout


def test_in_the_tests_it_is_not_ours_either() -> None:
    if Path(sys.argv[0]).name == "__main__.py":
        pytest.skip("started as `python -m pytest`, which puts the folder on the path; `pytest` does not")
    assert str(ROOT) not in f"{importlib.util.find_spec('kernels')}"


@pytest.fixture
def copied_project(package_dir: dict[str, str], tmp_path: Path) -> Path:
    """The project without its history: setuptools leaves build folders where it works."""
    copy = tmp_path / "project"
    for name in ["pyproject.toml", "README.md", "LICENSE", "NOTICE", "tools/link_tree.py"]:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for folder in package_dir.values():
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns(*NOT_SHIPPED), dirs_exist_ok=True)
    return copy


def test_the_link_tree_holds_every_module_at_its_imported_place(
    copied_project: Path, package_dir: dict[str, str]
) -> None:
    for _ in range(2):  # the second time over the first
        subprocess.run([sys.executable, copied_project / "tools" / "link_tree.py"], check=True)
    tree = copied_project / "build" / "tree"
    for place, file in sources(package_dir):
        assert (tree / place).is_symlink()
        assert (tree / place).read_bytes() == file.read_bytes()


@pytest.mark.integration
def test_the_wheel_holds_every_file_and_runs(copied_project: Path, package_dir: dict[str, str], tmp_path: Path) -> None:
    """Built as pip does it (setuptools comes from PyPI), unpacked, and started without the editable install."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), "."]
    done = subprocess.run(build, cwd=copied_project, capture_output=True, text=True, timeout=300)
    if done.returncode and "No matching distribution found for setuptools" in done.stderr:
        pytest.skip("PyPI cannot be reached")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("specdoctor-*.whl")
    assert wheel.name == f"specdoctor-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    meta = f"specdoctor-{__version__}.dist-info/"
    shipped = {name for name in names if not name.startswith(meta)}
    assert shipped == {place for place, _ in sources(package_dir)}
    assert {f"{meta}licenses/LICENSE", f"{meta}licenses/NOTICE"} <= names

    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in f'{f}'.lower()];"
        f"sys.path.insert(0, {str(tmp_path / 'site')!r});"
        "import specdoctor.checks.registry as r; from specdoctor.measure.scenarios import load_scenario;"
        "load_scenario('code'); print(r.__file__); from specdoctor.cli.app import main; main()"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, "rule", "SD101"], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0] == str(tmp_path / "site" / "specdoctor" / "checks" / "registry.py")
