"""Secrets of a command line are never written to a file."""

from __future__ import annotations

import pytest

from scoremode.core.disk.manifests import HIDDEN, command_without_secrets, is_secret, without_secrets


def test_secrets_are_known_by_their_names_and_hidden_at_any_depth() -> None:
    secrets = ("hf_token", "HF_TOKEN", "token", "api_key", "apikey", "secret", "aws-secret", "password")
    settings = ("tokenizer", "tokenizer_mode", "max_num_batched_tokens", "keys_to_keep", "seed")
    assert [is_secret(name) for name in (*secrets, *settings)] == [True] * 8 + [False] * 5
    given = {"a": [{"hf_token": "S"}, ("api_key", "S")], "b": {"c": {"password": ["S"]}}, "seed": 1}
    assert "S" not in str(without_secrets(given)).replace(HIDDEN, "")
    assert without_secrets(given)["seed"] == 1


def test_a_command_keeps_all_but_its_secrets() -> None:
    words = ["compare", "a", "--engine-arg", "hf_token=S", "--engine-arg=api_key=S", "--engine-arg", 'x={"token": "S"}']
    shown = command_without_secrets([*words, "--text", "a = b", "--fail-if", "kl_mean > 1"])
    assert "S" not in "".join(shown)
    assert shown[-4:] == ["--text", "a = b", "--fail-if", "kl_mean > 1"]


@pytest.mark.parametrize(
    "words", [["--token", "hf_secret"], ["--token=hf_secret"], ["--api-key", "hf_secret", "--json"]]
)
def test_the_value_of_a_secret_flag_is_hidden(words: list[str]) -> None:
    """Reports and model cards show the command that made them."""
    kept = command_without_secrets(["compare", "a", "b", *words])
    assert "hf_secret" not in " ".join(kept)
    assert kept[:3] == ["compare", "a", "b"]
    assert command_without_secrets(["--tokenizer", "folder"]) == ["--tokenizer", "folder"]
