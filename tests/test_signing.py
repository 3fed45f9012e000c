"""Signed goals: every honest one is accepted, every altered one refused, and keys do not leak."""

import copy
import pickle
import struct

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from hypothesis import given, settings
from hypothesis import strategies as st

from families import attached, close, logits, tokens
from sidestream.channels import LatentState
from sidestream.lm.goals.signing import (
    Ed25519Key,
    GoalRejected,
    HmacKey,
    load_key,
    seal,
    seal_goal,
    unseal,
    unseal_goal,
)
from sidestream.lm.models.fingerprint import fingerprint

SECRET = bytes(range(32))
MODEL, TEXT = "ab" * 32, "The passcode 4821 guards the golden key."
VECTOR = torch.linspace(-2, 2, 6)
HEADER = 82


def pem(key, *, public=False):
    if public:
        return key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def private(seed=7):
    return ed25519.Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)


KEYS = {"hmac": HmacKey(SECRET), "ed25519": Ed25519Key(pem(private()))}
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
texts = st.text() | st.lists(st.integers(0, 60_000), min_size=1)


@pytest.mark.parametrize("kind", KEYS)
@settings(max_examples=60, deadline=None)
@given(values=st.lists(floats, min_size=1, max_size=9), text=texts, model=st.binary(min_size=32, max_size=32))
def test_every_honest_goal_is_accepted(kind, values, text, model):
    vector = torch.tensor(values)
    sealed = seal(vector, text, model.hex(), KEYS[kind])
    found = unseal(sealed, text, model.hex(), KEYS[kind])
    assert found.numpy().tobytes() == vector.numpy().tobytes()  # to the bit, -0.0 too
    assert seal(vector, text, model.hex(), KEYS[kind]) == sealed


@pytest.mark.parametrize("kind", KEYS)
def test_every_flipped_bit_is_rejected(kind):
    key = KEYS[kind]
    sealed = seal(VECTOR, TEXT, MODEL, key)
    for place in range(8 * len(sealed)):
        altered = bytearray(sealed)
        altered[place // 8] ^= 1 << place % 8
        with pytest.raises(GoalRejected) as caught:
            unseal(bytes(altered), TEXT, MODEL, key)
        assert "\n" not in str(caught.value)
    assert torch.equal(unseal(sealed, TEXT, MODEL, key), VECTOR)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kind=st.sampled_from(sorted(KEYS)))
def test_no_edit_gets_through(data, kind):
    """Bytes replaced, cut out, put in, swapped between two goals of one key; or anything at all."""
    key = KEYS[kind]
    sealed, other = seal(VECTOR, TEXT, MODEL, key), seal(-VECTOR, "another", MODEL, key)
    start = data.draw(st.integers(0, len(sealed)))
    end = data.draw(st.integers(start, len(sealed)))
    middle = data.draw(st.binary(max_size=40) | st.just(other[start:end]))
    altered = data.draw(st.just(sealed[:start] + middle + sealed[end:]) | st.binary(max_size=300))
    if altered == sealed:
        return
    with pytest.raises(GoalRejected):
        unseal(altered, TEXT, MODEL, key)


@pytest.mark.parametrize("kind", KEYS)
def test_each_mismatch_has_its_own_error(kind):
    key = KEYS[kind]
    sealed = seal(VECTOR, TEXT, MODEL, key)
    stranger = HmacKey(SECRET[::-1]) if kind == "hmac" else Ed25519Key(pem(private(8)))
    with pytest.raises(GoalRejected, match="another key"):
        unseal(sealed, TEXT, MODEL, stranger)
    with pytest.raises(GoalRejected, match="another key"):
        unseal(sealed, TEXT, MODEL, KEYS["ed25519" if kind == "hmac" else "hmac"])
    with pytest.raises(GoalRejected, match="another model"):
        unseal(sealed, TEXT, "cd" * 32, key)
    with pytest.raises(GoalRejected, match="another goal text"):
        unseal(sealed, TEXT + " ", MODEL, key)
    with pytest.raises(GoalRejected, match="another goal text"):
        unseal(seal(VECTOR, [1, 2], MODEL, key), [1, 2, 0], MODEL, key)
    with pytest.raises(GoalRejected, match="version 2"):
        unseal(sealed[:4] + b"\x02" + sealed[5:], TEXT, MODEL, key)
    with pytest.raises(GoalRejected, match="cut short"):
        unseal(sealed[:-1], TEXT, MODEL, key)
    with pytest.raises(GoalRejected, match="not a sealed goal"):
        unseal(b"", TEXT, MODEL, key)


def test_a_forger_without_the_key_cannot_claim_its_id():
    """The id in the header is public; with it and a tag of one's own making the goal is still refused."""
    key = KEYS["hmac"]
    forger = HmacKey(SECRET[::-1])
    body = bytearray(seal(VECTOR * 3, TEXT, MODEL, forger)[:-32])
    body[6:14] = key.key_id
    with pytest.raises(GoalRejected, match="tag does not match"):
        unseal(bytes(body) + forger.tag(bytes(body)), TEXT, MODEL, key)
    assert torch.equal(unseal(bytes(body) + key.tag(bytes(body)), TEXT, MODEL, key), VECTOR * 3)


def test_the_format_is_stated():
    sealed = seal(VECTOR, TEXT, MODEL, KEYS["hmac"])
    assert len(sealed) == HEADER + 4 * 6 + 32
    assert sealed[:6] == b"SSGS\x01\x01" and sealed[6:14] == KEYS["hmac"].key_id
    assert struct.unpack("<I", sealed[14:18]) == (6,) and sealed[18:50] == bytes.fromhex(MODEL)
    assert struct.unpack("<6f", sealed[HEADER:-32]) == tuple(VECTOR.tolist())


def test_tags_are_compared_in_constant_time(monkeypatch):
    """A test of the call, as its timing cannot be tested here."""
    compared = []
    monkeypatch.setattr("hmac.compare_digest", lambda left, right: compared.append(left) or left == right)
    key = KEYS["hmac"]
    sealed = seal(VECTOR, TEXT, MODEL, key)
    unseal(sealed, TEXT, MODEL, key)
    assert sealed[-32:] in compared


@pytest.mark.parametrize(
    "vector",
    [torch.tensor([1.0, torch.nan]), torch.tensor([torch.inf]), torch.ones(2, 3), torch.ones(0), torch.ones(3).long()],
)
def test_what_is_no_vector_is_not_sealed(vector):
    with pytest.raises(ValueError, match="goal vector"):
        seal(vector, TEXT, MODEL, KEYS["hmac"])


# ---------------------------------------------------------------- on a model


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_a_sealed_goal_steers_as_the_goal_itself(mode):
    model, goal, ids = attached("llama", mode), [3, 7, 41], tokens(1, 9)
    sealed = seal_goal(model, goal, KEYS["hmac"])
    state = unseal_goal(model, sealed, goal, KEYS["hmac"], model_fingerprint=fingerprint(model))
    close(logits(model, ids, goal=state), logits(model, ids, goal=[goal]))
    other = seal_goal(model, [9, 9], KEYS["hmac"])
    with pytest.raises(GoalRejected, match="another goal text"):
        unseal_goal(model, other, goal, KEYS["hmac"])


@pytest.mark.parametrize("part", ["lm", "encoder", "channel"])
def test_a_changed_model_is_another_model(part):
    model, goal = attached("llama", "dynamic"), [3, 7]
    sealed = seal_goal(model, goal, KEYS["hmac"])
    unseal_goal(model, sealed, goal, KEYS["hmac"])
    with torch.no_grad():
        next(getattr(model, part).parameters()).add_(0.1)
    with pytest.raises(GoalRejected, match="another model"):
        unseal_goal(model, sealed, goal, KEYS["hmac"])


def test_a_given_state_is_sealed():
    model, goal = attached("llama", "static"), [3, 7]
    state = LatentState(goal=torch.ones(1, 16))
    sealed = seal_goal(model, goal, KEYS["hmac"], state=state)
    assert torch.equal(unseal_goal(model, sealed, goal, KEYS["hmac"]).goal, state.goal)
    with pytest.raises(ValueError, match="one row"):
        seal_goal(model, goal, KEYS["hmac"], state=LatentState(goal=torch.ones(2, 16)))


# ---------------------------------------------------------------- keys


def test_public_keys_check_and_do_not_seal():
    public = Ed25519Key(pem(private(), public=True))
    sealed = seal(VECTOR, TEXT, MODEL, KEYS["ed25519"])
    assert torch.equal(unseal(sealed, TEXT, MODEL, public), VECTOR)
    with pytest.raises(ValueError, match="public key"):
        seal(VECTOR, TEXT, MODEL, public)


def test_keys_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "key"
    path.write_text(SECRET.hex() + "\n")
    monkeypatch.setenv("GOAL_KEY", pem(private()).decode())
    by_file, by_name = load_key(file=path), load_key(environment="GOAL_KEY")
    assert by_file.key_id == KEYS["hmac"].key_id and by_name.key_id == KEYS["ed25519"].key_id
    path.write_bytes(pem(private(), public=True))
    assert load_key(file=path).key_id == KEYS["ed25519"].key_id


BAD = {
    "short": SECRET[:31].hex().encode(),
    "odd": SECRET.hex().encode() + b"0",
    "not hex": b"correct horse battery staple " * 3,
    "not text": b"\xff" * 64,
    "broken PEM": b"-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n",
    "other curve": pem(ec.generate_private_key(ec.SECP256R1())),
    "encrypted": private().private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"x")
    ),
    "empty": b" \n",
}


@pytest.mark.parametrize("case", BAD)
def test_bad_keys_are_refused_without_being_quoted(case, tmp_path):
    path = tmp_path / "key"
    path.write_bytes(BAD[case])
    with pytest.raises(ValueError) as caught:
        load_key(file=path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    lines = [line for line in BAD[case].strip().split(b"\n") if len(line) > 7]
    assert not any(line[:8].decode("latin-1") in message for line in lines if not line.startswith(b"-----"))
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_key_has_one_source(tmp_path, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ValueError, match="not set"):
        load_key(environment="NO_SUCH_KEY")
    with pytest.raises(ValueError, match="cannot be read"):
        load_key(file=tmp_path / "none")
    for places in ({}, {"file": tmp_path, "environment": "X"}):
        with pytest.raises(ValueError, match="one place"):
            load_key(**places)


@pytest.mark.parametrize("kind", KEYS)
def test_keys_do_not_show_or_travel(kind):
    key = KEYS[kind]
    secret = SECRET if kind == "hmac" else bytes([7]) * 32
    shown = f"{key!r} {key} {[key]}"
    assert key.key_id.hex() in shown
    assert secret.hex() not in shown and repr(secret) not in shown and not hasattr(key, "__dict__")
    for leak in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled"):
            leak(key)
