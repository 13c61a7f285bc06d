"""How many rows of logits may be alive at once, and which kernels there are: known without importing torch."""

from scoremode.errors import OptionError

KERNELS = ("fused", "rows", "blocked", "plain")
"""``fused``: Triton, product and reduction in one pass, no logits anywhere. ``rows``: the library's product of a few
rows, reduced by Triton in one pass. ``blocked``: for CPUs, blocks that stay in the cache. ``plain``: PyTorch anywhere.
"""

CPU_BUDGET = 24 << 20  # below what glibc gives back to the system at each free, so that pages are not faulted in again
DEVICE_BUDGET = 224 << 20  # rows enough to keep a large GPU busy, and less than a quarter of a GiB beside the model
CPU_WORKSPACE, DEVICE_WORKSPACE = 4 << 20, 96 << 20  # what sums may take beside the logits; in the cache of a CPU
TILE = 128  # rows that matrix kernels of GPUs take at a time


def check_kernel_name(name: str | None) -> None:
    if name is not None and name not in KERNELS:
        raise OptionError(f"--head-kernel {name} is not known", fix=f"give one of {', '.join(KERNELS)}")


def default_budget(device: str) -> int:
    """Bytes of float32 logits of one model that one chunk of rows may take. A divergence holds those of two."""
    return CPU_BUDGET if device == "cpu" else DEVICE_BUDGET


def most_bytes(device: str, models: int = 1) -> int:
    """Bytes that a kernel without a fused product needs beside the weights: logits, and the workspace of sums.

    >>> most_bytes("cuda", models=2) >> 20
    544
    """
    return models * default_budget(device) + (CPU_WORKSPACE if device == "cpu" else DEVICE_WORKSPACE)


def rows_of_workspace(columns: int, bytes_each: int, device: str) -> int:
    """Rows that may be reduced together where each logit takes so many bytes of temporary numbers."""
    workspace = CPU_WORKSPACE if device == "cpu" else DEVICE_WORKSPACE
    return max(1, workspace // (bytes_each * max(1, columns)))


def rows_within(budget: int, columns: int, device: str) -> int:
    """Rows of float32 logits that fit into a budget (0: the device's own), whole tiles of them on a GPU."""
    rows = max(1, (budget or default_budget(device)) // (4 * max(1, columns)))
    return rows - rows % TILE if device != "cpu" and rows > TILE else rows
