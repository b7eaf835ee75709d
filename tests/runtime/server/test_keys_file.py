"""The keys file: what it may hold, what is said of what it may not, and whose key a request carries."""

import hashlib

import pytest

from busload_runtime.server.api_keys import MAX_BYTES, MAX_KEYS, KeysError, parse_keys
from busload_runtime.server.errors import ApiError


def line(name: str, key: str, weight: str = "") -> str:
    return f"{name}:{hashlib.sha256(key.encode()).hexdigest()}{weight}\n"


def test_a_key_belongs_to_the_name_of_its_line() -> None:
    keys = parse_keys(f"# ours\n\n{line('web', 'k1', ':3')}{line('web', 'k2', ':3')}  {line('batch', 'k3')}".encode())
    first, second, third = (keys.owner(f"Bearer {key}") for key in ("k1", "k2", "k3"))
    assert first == second
    assert (first.label, first.weight, third.label, third.weight) == ("web", 3.0, "batch", 1.0)
    assert first.name != third.name
    assert first.bounded
    assert keys.tenants == 2
    assert not parse_keys(line("only", "k").encode()).owner("bearer k").bounded


@pytest.mark.parametrize(
    "value", [None, "", "k1", "Basic k1", "Bearer", "Bearer ", "Bearer k2", "Bearer k1 x", "BearerXk1"]
)
def test_anything_else_is_a_401_that_says_how(value: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        parse_keys(line("web", "k1").encode()).owner(value)
    assert (caught.value.status, caught.value.code, caught.value.reason) == (401, "invalid_api_key", "unauthorized")
    assert caught.value.headers() == {"www-authenticate": "Bearer"}
    assert "k1" not in caught.value.message


def test_a_key_that_is_no_text_is_not_valid_and_no_crash() -> None:
    with pytest.raises(ApiError):
        parse_keys(line("web", "k1").encode()).owner("Bearer \udcff\x80ü")


def test_a_key_may_have_letters_beyond_ascii() -> None:
    """What clients send in UTF-8 comes as latin-1 text."""
    keys = parse_keys(line("web", "clé").encode())
    assert keys.owner("Bearer " + "clé".encode().decode("latin-1")).label == "web"


DIGEST = hashlib.sha256(b"k1").hexdigest()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "0 keys; it needs at least 1"),
        ("# nothing\n\n", "0 keys; it needs at least 1"),
        ("sk-plain-secret\n", "line 1: a line is NAME:HASH or NAME:HASH:WEIGHT, this one has 1 parts"),
        ("\nweb:sk-plain-secret\n", "line 2: the hash of web must be the 64 hex digits"),
        (f"web:{DIGEST}0\n", "has 65 characters"),
        (f"my web:{DIGEST}\n", "line 1: a name has 1 to 63 letters"),
        (f":{DIGEST}\n", "line 1: a name has 1 to 63 letters"),
        (f"web:{DIGEST}:0\n", "the weight of web must be a number from 0.01 to 100"),
        (f"web:{DIGEST}:nan\n", "the weight of web must be a number from 0.01 to 100"),
        (f"web:{DIGEST}:heavy\n", "the weight of web must be a number from 0.01 to 100"),
        (f"web:{DIGEST}\nbatch:{DIGEST}\n", "line 2: this key is in the file already, as web"),
        (line("web", "k1", ":2") + line("web", "k2"), "line 2: web has weight 2 further up, and here 1"),
        ("x" * (MAX_BYTES + 1), "the file is larger than"),
        ("".join(line(f"n{i}", f"k{i}") for i in range(MAX_KEYS + 1)), "1001 keys"),
    ],
)
def test_what_cannot_be_used_is_named_and_never_shown(content: str, message: str) -> None:
    with pytest.raises(KeysError) as caught:
        parse_keys(content.encode())
    assert message in str(caught.value)
    assert "sk-plain-secret" not in str(caught.value)


def test_a_byte_order_mark_is_skipped() -> None:
    assert parse_keys(b"\xef\xbb\xbf" + line("web", "k1").encode()).owner("Bearer k1").label == "web"


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(KeysError, match="not UTF-8"):
        parse_keys(b"\xff\xfe")
