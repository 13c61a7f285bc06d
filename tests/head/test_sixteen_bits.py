"""Records in 16 bits: byte for byte those of the longhand, and their divergence by llama.cpp's rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scoremode.head.budget import words_of
from scoremode.head.sixteen_bits import encode_records, kl_from_records, stored_log_probabilities
from tests.studies.kld.kld_files import kl_longhand, random_logits, record


def encoded(logits: np.ndarray) -> bytes:
    return encode_records(torch.from_numpy(logits)).numpy().tobytes()


@pytest.mark.parametrize("vocabulary", [2, 3, 256, 311, 5003])
@pytest.mark.parametrize("size", [1e-3, 1.0, 4.0, 30.0])
def test_records_are_those_of_the_longhand_byte_for_byte(vocabulary: int, size: float) -> None:
    logits = random_logits(12, vocabulary, seed=vocabulary, size=size)
    assert encoded(logits) == b"".join(record(row) for row in logits)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("size", [1.0, 4.0, 30.0])
def test_a_gpu_writes_the_same_bytes(size: float) -> None:
    logits = torch.from_numpy(random_logits(64, 5003, seed=9, size=size))
    there = encode_records(logits.cuda())
    assert torch.equal(there.cpu(), encode_records(logits))
    kl = kl_from_records(there, logits.cuda().roll(1, 0)).cpu()
    assert kl.numpy() == pytest.approx(kl_from_records(there.cpu(), logits.roll(1, 0)).numpy(), rel=1e-12)


def test_ties_go_to_the_even_code_and_forbidden_ids_to_the_floor() -> None:
    step = np.float32(1 / 4096)  # of a range of 65535 / 4096 nats, so that halves of steps are exact
    row = np.array([0, 0.5 * step, 1.5 * step, 2.5 * step, 65535 * step], np.float32)[None]
    assert encode_records(torch.from_numpy(row))[0, 4:9].tolist() == [0, 0, 2, 2, -1]
    forbidden = np.array([[0, 1, -np.inf, 2, -np.inf]], np.float32)
    for logits in (row, np.zeros((1, 7), np.float32), forbidden):
        assert encoded(logits) == record(logits[0])
    stored = stored_log_probabilities(encode_records(torch.from_numpy(forbidden)), 5)[0]
    assert float(stored[2]) == pytest.approx(float(stored[3]) - 16, abs=1e-3), "the floor, not minus infinity"


def test_halves_and_many_rows_are_the_same_numbers() -> None:
    logits = random_logits(700, 3001, seed=3)  # more than one block of rows
    whole = encode_records(torch.from_numpy(logits))
    parts = torch.cat([encode_records(torch.from_numpy(part)) for part in np.array_split(logits, 9)])
    assert torch.equal(whole, parts)
    half = torch.from_numpy(logits).half()
    assert torch.equal(encode_records(half), encode_records(half.float()))
    assert whole.shape == (700, words_of(3001))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_logit_that_is_not_a_number_cannot_be_mistaken_for_one(bad: float) -> None:
    logits = random_logits(1, 50)
    logits[0, 7] = bad
    floats = encode_records(torch.from_numpy(logits))[:, :4].contiguous().view(torch.float32)
    assert not bool(torch.isfinite(floats).all())


@pytest.mark.parametrize("vocabulary", [5, 311, 700])
def test_kl_is_that_of_the_longhand(vocabulary: int) -> None:
    p, q = random_logits(40, vocabulary, seed=1), random_logits(40, vocabulary, seed=2)
    records = encode_records(torch.from_numpy(p))
    found = kl_from_records(records, torch.from_numpy(q)).numpy()
    for row in range(40):
        stored = stored_log_probabilities(records[row : row + 1], vocabulary)[0].tolist()
        assert found[row] == pytest.approx(kl_longhand(stored, q[row]), rel=1e-12, abs=1e-14)


def test_a_model_diverges_from_its_own_16_bits_by_little_and_in_both_directions() -> None:
    p = random_logits(400, 3000, seed=5)
    kl = kl_from_records(encode_records(torch.from_numpy(p)), torch.from_numpy(p))
    assert float(kl.min()) < 0 < float(kl.max())
    assert float(kl.abs().max()) < 1e-3


def test_an_id_that_the_candidate_forbids_is_an_infinite_divergence() -> None:
    p, q = np.zeros((1, 3), np.float32), np.array([[0, 0, -np.inf]], np.float32)
    assert kl_from_records(encode_records(torch.from_numpy(p)), torch.from_numpy(q)).tolist() == [np.inf]
    rare = np.array([[20, 20, 0]], np.float32)  # below e^-16: left out
    assert kl_from_records(encode_records(torch.from_numpy(rare)), torch.from_numpy(q))[0] < np.inf
