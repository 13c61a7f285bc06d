"""docs/commands.md and the source agree: every variable that is read or set is on the page, and nothing else is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.house import files

PAGE = (Path(__file__).parents[1] / "docs" / "commands.md").read_text(encoding="utf-8")
FAMILIES = ("SCOREMODE_", "VLLM_", "RAY_", "AWS_", "HF_", "NVIDIA_", "OMP_", "TORCH_", "XDG_", "EXL3_", "EXLLAMA")
NAME = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]*)*")
READING = ("environ.get", "environ.setdefault", "environ.pop", "getenv")
EXPANDED = ("VLLM_USE_", "VLLM_FLASH_ATTN", "VLLM_FLOAT32_MATMUL", "VLLM_MARLIN", "VLLM_NVFP4", "EXL3_", "EXLLAMA")
"""Beginnings of names, shown with "…" on the page."""


def in_source() -> set[str]:
    """Names by which the source may address the environment: literals of a family, and arguments of ``environ``."""
    found: set[str] = set()
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                is_name = NAME.fullmatch(node.value) and node.value.startswith(FAMILIES) and "_" in node.value
                found |= {node.value} if is_name or node.value in EXPANDED else set()
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(READING):
                found |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)}
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("environ"):
                found |= {node.slice.value} if isinstance(node.slice, ast.Constant) else set()  # type: ignore[arg-type]
    return found


def on_page(*titles: str) -> set[str]:
    """Names in the first column of the tables under these headings."""
    found: set[str] = set()
    for title in titles:
        section = PAGE.split(f"### {title}\n")[1].split("\n### ")[0]
        cells = re.findall(r"^\| (.*?) \|", section, re.MULTILINE)
        found |= {name for cell in cells for name in re.findall(r"`([A-Z][A-Z0-9_]+)…?`", cell)}
    return found


OURS = ("For you to set", "Secrets", "Of other programs", "Set by scoremode for its own processes")


def test_every_variable_of_the_source_is_on_the_page() -> None:
    assert len(in_source()) > 30, "the source is searched"
    assert in_source() - on_page(*OURS) == set()


def test_every_variable_on_the_page_is_in_the_source() -> None:
    text = "\n".join(path.read_text() for path in files())
    assert {name for name in on_page(*OURS) if name not in text} == set()


def test_variables_of_libraries_are_not_read_by_scoremode() -> None:
    assert on_page("Read by libraries alone") & in_source() == set()
