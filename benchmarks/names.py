"""Sixty names of models, good and bad: what each is answered, and how long that takes.

    python benchmarks/names.py

The hub is a stand-in on the loopback, with files of 10 kB, so the times are those of scoremode and of the hub's client,
not of a network. The last line is a hub that does not answer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.hub import serving, silent_server
from tests.remote.models.names import NAMES, answer, furnish, is_expected

from scoremode.remote.models import hub as hub_names


def timed(name: str) -> tuple[str, float]:
    began = time.perf_counter()
    return answer(name), time.perf_counter() - began


def main(words: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args(words)
    with (
        tempfile.TemporaryDirectory() as made,
        pytest.MonkeyPatch.context() as patch,
        serving(patch, folder := Path(made)) as hub,
    ):
        furnish(hub, folder)
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub"))
        patch.setenv("OLLAMA_MODELS", str(folder / "ollama"))
        patch.chdir(folder)
        hub_names.listing.cache_clear()
        found = {name: timed(name) for name in NAMES}
        for name, (said, seconds) in found.items():
            mark = "as expected" if is_expected(name, said) else "NOT EXPECTED"
            print(f"{name:62} {seconds * 1e3:6.1f} ms  {mark}  {said.replace(str(folder), '')[:150]}")
        wrong = [name for name, (said, _) in found.items() if not is_expected(name, said)]
        print(f"{len(found)} names, {len(wrong)} not as expected")
        for kind, refused in (("found", False), ("refused", True)):
            times = [1e3 * seconds for said, seconds in found.values() if said.startswith("!") == refused]
            print(f"{len(times)} {kind}: median {median(times):.1f} ms, longest {max(times):.0f} ms")
        with silent_server() as address:
            patch.setenv("HF_ENDPOINT", address)
            hub_names.listing.cache_clear()
            said, seconds = timed("org/other:Q4_0")
        print(f"without a network: {seconds:.2f} s, {said}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
