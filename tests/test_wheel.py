"""What `pip install scoremode` gives: the wheel is complete, and works from where it was installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

pytest.importorskip("build")
pytest.importorskip("hatchling")

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment that has the wheel, and its dependencies from the environment of the tests.

    A .pth file adds that environment's packages at the end of the path. Files named .pth in there are not read, so the
    editable install of this checkout, which is one, stays out.
    """
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    bins = folder / "bin"
    python = bins / "python"
    target = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    command = [*pip, "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    packages = dict.fromkeys((sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]))
    (Path(target) / "dependencies.pth").write_text("\n".join(packages) + "\n")
    return bins


def run(installed: Path, *arguments: str, cwd: Path) -> str:
    """Run a program of the new environment, away from the checkout and without its source folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment |= {"SCOREMODE_CACHE": str(cwd / "cache")}
    command = [str(installed / arguments[0]), *arguments[1:]]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ── uv ───────────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.fixture(scope="module")
def index(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that stands for the package index: the wheel, and for each of its dependencies a wheel without content.

    They have the versions of this environment, so uv resolves what the wheel really asks for. One of them adds this
    environment's packages to the path. What uv would do with a real index, fetching files, is not seen here.
    """
    folder = tmp_path_factory.mktemp("index")
    shutil.copy(wheel, folder)
    asked = [Requirement(line) for line in PROJECT["dependencies"]]
    paths = dict.fromkeys((sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]))
    for one in asked:
        if one.marker is None or one.marker.evaluate():
            name, version = one.name.replace("-", "_"), metadata.version(one.name)
            content = {f"{name}_dependencies.pth": "\n".join(paths) + "\n"} if one.name == "numpy" else {}
            info = f"{name}-{version}.dist-info"
            content[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {one.name}\nVersion: {version}\n"
            content[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            content[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*content, f"{info}/RECORD"])
            with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
                for file, text in content.items():
                    archive.writestr(file, text)
    return folder


def with_uv(index: Path, cwd: Path, *words: str) -> str:
    """What a command of uv prints that has no network and no package but those of the folder."""
    uv = pytest.importorskip("uv").find_uv_bin()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL", "UV_"))
    }
    environment |= {"SCOREMODE_CACHE": str(cwd / "cache"), "UV_OFFLINE": "1", "UV_NO_INDEX": "1"}
    environment |= {"UV_FIND_LINKS": str(index), "UV_CACHE_DIR": str(cwd / "uv"), "UV_PYTHON": sys.executable}
    done = subprocess.run(
        [uv, *words], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_uvx_runs_the_first_command_of_the_readme_from_the_wheel(index: Path, wheel: Path, tmp_path: Path) -> None:
    """With a small model instead of the embedded one, which takes half a minute."""
    command = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("$ scoremode "))
    words = [str(ROOT / "tests/data/stories260K") if word == "smollm2-135m" else word for word in command.split()[1:]]
    assert words[2].endswith("stories260K")
    shown = with_uv(index, tmp_path, "tool", "run", "--from", str(wheel), *words)
    assert "perplexity" in shown
    assert "python-docs" in shown


def test_uv_runs_the_script_for_rented_machines(index: Path, tmp_path: Path) -> None:
    script = str(ROOT / "examples/compare_quantizations.py")
    shown = with_uv(index, tmp_path, "run", "--no-project", script, "table:uniform", "table:uniform")
    assert "KL up to 0.01: table:uniform" in shown


# ── pip ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_every_file_of_the_source_folder_is_in_the_wheel_and_nothing_else(names: set[str]) -> None:
    """The report's style and script and the marker of types among them."""
    source = ROOT / "src"
    ours = {p.relative_to(source).as_posix() for p in (source / "scoremode").rglob("*") if p.is_file()}
    ours = {name for name in ours if "__pycache__" not in name}
    assert {Path(name).name for name in ours} >= {"report.css", "report.js", "py.typed"}
    assert {name for name in names if name.startswith("scoremode/")} == ours
    folders = {name.split("/")[0] for name in names}
    assert folders == {"scoremode", f"scoremode-{PROJECT['version']}.dist-info"}
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_entry_points_are_declared_and_can_be_loaded(installed: Path, tmp_path: Path) -> None:
    """The command, the vLLM plugin, and whatever else pyproject.toml declares."""
    declared = {("console_scripts", name): value for name, value in PROJECT["scripts"].items()}
    for group, entries in PROJECT.get("entry-points", {}).items():
        declared |= {(group, name): value for name, value in entries.items()}
    assert ("console_scripts", "scoremode") in declared
    assert ("vllm.general_plugins", "scoremode") in declared
    code = """
import importlib.metadata, json
found = importlib.metadata.distribution("scoremode").entry_points
for point in found:
    point.load()
print(json.dumps([[point.group, point.name, point.value] for point in found]))
"""
    found = json.loads(run(installed, "python", "-c", code, cwd=tmp_path).splitlines()[-1])
    assert {(group, name): value for group, name, value in found} == declared


def test_the_installed_command_is_the_wheels_and_its_report_finds_its_style_and_script(
    installed: Path, tmp_path: Path
) -> None:
    found = Path(run(installed, "python", "-c", "import scoremode; print(scoremode.__file__)", cwd=tmp_path).strip())
    assert not found.is_relative_to(ROOT)
    assert PROJECT["version"] in run(installed, "scoremode", "--version", cwd=tmp_path)
    asked = ("ppl", "table:uniform", "--text", "any text", "--out", "run", "--json")
    assert json.loads(run(installed, "scoremode", *asked, cwd=tmp_path))["perplexity"] == pytest.approx(256)
    run(installed, "scoremode", "report", "run", "-o", "report.html", cwd=tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<style>" in page
    assert "<script>" in page
