"""A distribution in 16 bits, as llama.cpp keeps it; importable without torch.

record = float32 scale | float32 log-probability of code 0 | one uint16 code per id | zero, if that makes it even
"""

FLOOR = 16.0  # nats below the largest logit: what is lower is stored as exactly that
LEFT_OUT = -16.0  # log-probabilities from here on down are left out of llama.cpp's divergence
LARGEST_CODE = 65535


def words_of(vocabulary: int) -> int:
    """16-bit words of a record.

    >>> words_of(311), words_of(312)
    (316, 316)
    """
    return 2 * ((vocabulary + 1) // 2) + 4
