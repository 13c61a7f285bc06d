"""How many bytes of logits may be alive at once. Apart, so that a dry run knows it without importing torch."""

CPU_BUDGET = 24 << 20  # below what glibc gives back to the system at each free, so that pages are not faulted in again
DEVICE_BUDGET = 96 << 20


def default_budget(device: str) -> int:
    """Bytes of float32 logits that one chunk of rows may take."""
    return CPU_BUDGET if device == "cpu" else DEVICE_BUDGET
