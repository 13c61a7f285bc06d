"""The memory for logits, the names of the kernels, and the size of a 16-bit distribution. Does not import torch.

A distribution in 16 bits, as llama.cpp stores it:

record = float32 scale | float32 log-probability of code 0 | one uint16 code per id | a zero if the id count is odd
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scoremode.errors import OptionError

if TYPE_CHECKING:
    import torch

KERNELS = ("fused", "rows", "blocked", "plain")
"""``fused``: Triton, product and reduction in one pass; logits are never stored. ``rows``: PyTorch's product of a few
rows, reduced by Triton in one pass. ``blocked``: for CPUs, blocks that stay in the cache. ``plain``: PyTorch, any
device.
"""

CPU_BUDGET = 24 << 20  # below the size that glibc returns to the system on free, so that pages are not faulted in again
DEVICE_BUDGET = 224 << 20  # enough rows to keep a large GPU busy; less than a quarter of a GiB, besides the model
CPU_WORKSPACE, DEVICE_WORKSPACE = 4 << 20, 96 << 20  # for sums, besides the logits; on a CPU it fits into the cache
FLOOR = 16.0  # nats below the largest logit; a record stores lower logits as exactly this far below
LEFT_OUT = -16.0  # llama.cpp's divergence leaves out log-probabilities at or below this
LARGEST_CODE = 65535
FIRST = 5  # choices of two models that are compared in order
TILE = 128  # rows that a GPU's matrix kernels process at a time


def check_kernel_name(name: str | None) -> None:
    if name is not None and name not in KERNELS:
        raise OptionError(f"--head-kernel {name} is not known", fix=f"give one of {', '.join(KERNELS)}")


def default_budget(device: str) -> int:
    """Returns the most bytes of float32 logits per chunk of rows and model. A divergence needs twice as many."""
    return CPU_BUDGET if device == "cpu" else DEVICE_BUDGET


def most_bytes(device: str, models: int = 1) -> int:
    """Returns the bytes that an unfused kernel needs in addition to the weights: logits and a workspace for sums.

    >>> most_bytes("cuda", models=2) >> 20
    544
    """
    return models * default_budget(device) + (CPU_WORKSPACE if device == "cpu" else DEVICE_WORKSPACE)


def free_on(device: torch.device) -> int:
    """Returns the bytes that this process may still allocate on a GPU."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def rows_of_workspace(columns: int, bytes_each: int, device: str) -> int:
    """Returns how many rows may be reduced together if each logit needs ``bytes_each`` bytes of temporary memory."""
    workspace = CPU_WORKSPACE if device == "cpu" else DEVICE_WORKSPACE
    return max(1, workspace // (bytes_each * max(1, columns)))


def rows_within(budget: int, columns: int, device: str) -> int:
    """Returns how many rows of float32 logits fit into a budget (0: the default); on a GPU, a multiple of TILE."""
    rows = max(1, (budget or default_budget(device)) // (4 * max(1, columns)))
    return rows - rows % TILE if device != "cpu" and rows > TILE else rows


def words_of(vocabulary: int) -> int:
    """Returns the number of 16-bit words in a record.

    >>> words_of(311), words_of(312)
    (316, 316)
    """
    return 2 * ((vocabulary + 1) // 2) + 4
