"""Signed goals: a vector is put in force only if a key holder sealed it for this text and this model.

A sealed goal is one byte string, all integers little-endian:

| bytes | what | bytes | what |
|---|---|---|---|
| 4 | `SSGS` | 32 | fingerprint of the model, channel included |
| 1 | version, 1 | 32 | sha256 of the goal's text |
| 1 | algorithm: 1 HMAC-SHA256, 2 Ed25519 | 4 x G | the vector, float32 |
| 8 | key id | 32 or 64 | tag over everything before it |
| 4 | G, width of the vector | | |

`unseal_goal` checks the tag before it believes anything else in it, and gives the state made of the very bytes that
were tagged, so that FiLM never sees others.

What this does not do: it does not say that a sealed goal is a good one; it does not stop an old sealed goal from being
shown again together with its own text; and the fingerprint samples each weight tensor, so it tells models apart and
does not withstand someone who alters single weights on purpose.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sidestream.channels import LatentState
from sidestream.lm.attach import AttachedLM
from sidestream.lm.models.fingerprint import fingerprint

_MAGIC = b"SSGS"
_VERSION = 1
_HEADER = struct.Struct("<4sBB8sI32s32s")
_SECRET_BYTES = 32  # as many as the tag has: a shorter secret would be the weaker part

GoalText = str | Sequence[int]
"""The goal as it was given to `encode_goal`: text, or a list of token ids."""


class GoalRejected(ValueError):
    """A sealed goal that must not come into force. One line says why."""


class HmacKey:
    """A shared secret: whoever can check a goal can also seal one. Prints as its id and cannot be pickled.

    Args:
        secret: at least 32 bytes from a good source, such as `secrets.token_bytes(32)`.

    Raises:
        ValueError: a shorter secret.
    """

    __slots__ = ("_secret", "key_id")
    algorithm = 1
    tag_bytes = 32

    def __init__(self, secret: bytes) -> None:
        if len(secret) < _SECRET_BYTES:
            raise ValueError(f"the HMAC secret has {len(secret)} bytes; it must have at least {_SECRET_BYTES}")
        self._secret = bytes(secret)
        self.key_id = self.tag(b"sidestream key id")[:8]

    def tag(self, message: bytes) -> bytes:
        """HMAC-SHA256 of a message."""
        return hmac.new(self._secret, message, hashlib.sha256).digest()

    def matches(self, message: bytes, tag: bytes) -> bool:
        """Whether the tag is the message's, compared in constant time."""
        return hmac.compare_digest(self.tag(message), tag)

    def __repr__(self) -> str:
        return f"HmacKey(id={self.key_id.hex()})"

    def __reduce__(self) -> Any:
        raise TypeError("a key is not pickled or copied; load it where it is needed")


class Ed25519Key:
    """A private key seals and checks; a public one only checks. Prints as its id and cannot be pickled.

    Args:
        pem: an unencrypted PKCS8 private key or a public key, as `openssl genpkey -algorithm ed25519` writes them.

    Raises:
        ValueError: not such a key, or the package `cryptography` is missing.
    """

    __slots__ = ("_private", "_public", "key_id")
    algorithm = 2
    tag_bytes = 64

    def __init__(self, pem: bytes) -> None:
        try:
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives import serialization
            from cryptography.hazmat.primitives.asymmetric import ed25519
        except ImportError:
            raise ValueError("Ed25519 keys need the package cryptography: pip install 'sidestream[sign]'") from None
        key: Any = None
        # What the parser says may quote the key, so none of it is passed on.
        try:
            if b"PRIVATE KEY" in pem:
                key = serialization.load_pem_private_key(pem, password=None)
            else:
                key = serialization.load_pem_public_key(pem)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise ValueError("the key is encrypted or no readable PEM; give an unencrypted Ed25519 key") from None
        private = isinstance(key, ed25519.Ed25519PrivateKey)
        if not private and not isinstance(key, ed25519.Ed25519PublicKey):
            raise ValueError("the key is PEM but not of Ed25519; make one with: openssl genpkey -algorithm ed25519")
        self._private: Any = key if private else None
        self._public: Any = key.public_key() if private else key
        raw = self._public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        self.key_id = hashlib.sha256(b"sidestream key id" + raw).digest()[:8]

    def tag(self, message: bytes) -> bytes:
        """The signature of a message.

        Raises:
            ValueError: a public key, which can only check.
        """
        if self._private is None:
            raise ValueError("this is a public key, which checks goals and cannot seal them; load the private one")
        return self._private.sign(message)

    def matches(self, message: bytes, tag: bytes) -> bool:
        """Whether the signature is the message's."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._public.verify(tag, message)
        except InvalidSignature:
            return False
        return True

    def __repr__(self) -> str:
        kind = "public" if self._private is None else "private"
        return f"Ed25519Key({kind}, id={self.key_id.hex()})"

    def __reduce__(self) -> Any:
        raise TypeError("a key is not pickled or copied; load it where it is needed")


Key = HmacKey | Ed25519Key


def load_key(*, file: str | Path | None = None, environment: str | None = None) -> Key:
    """A key from a file or an environment variable, never from an argument, which shells and logs would keep.

    Either holds an Ed25519 key in PEM, or an HMAC secret in hexadecimal: 64 digits or more, as
    `python -c "import secrets; print(secrets.token_hex(32))"` prints.

    Raises:
        ValueError: both or neither named, nothing there, or no key in it. No message quotes what was read.
    """
    if (file is None) == (environment is None):
        raise ValueError("name one place for the key: load_key(file=...) or load_key(environment=...)")
    if file is not None:
        source = f"key file {file}"
        try:
            raw = Path(file).read_bytes()
        except OSError as error:
            raise ValueError(f"{source} cannot be read: {error.strerror}") from None
    else:
        source = f"environment variable {environment}"
        raw = os.environ.get(str(environment), "").encode("utf-8", "surrogateescape")
    raw = raw.strip()
    if not raw:
        raise ValueError(f"{source} is empty or not set")
    try:
        if raw.startswith(b"-----BEGIN"):
            return Ed25519Key(raw + b"\n")
        return HmacKey(_from_hex(raw))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _from_hex(raw: bytes) -> bytes:
    try:
        return bytes.fromhex(raw.decode("ascii"))
    except ValueError:
        raise ValueError("neither PEM nor hexadecimal digits in pairs") from None


def seal_goal(model: AttachedLM, text: GoalText, key: Key, *, state: LatentState | None = None) -> bytes:
    """Encode a goal and seal its vector for this text and this model.

    Args:
        state: a state of one row to seal in place of the one that the text encodes to, for vectors that were snapped or
            trained. Its tracker history is not sealed: it starts a rollout.

    Raises:
        ValueError: more than one row, a vector that is not finite, or a key that can only check.
    """
    if state is None:
        with torch.no_grad():
            state = model.encode_goal(text if isinstance(text, str) else [list(text)])
    if state.goal is None or state.goal.shape[0] != 1 or state.history is not None:
        raise ValueError("a goal is sealed one row at a time, before its rollout starts")
    return seal(state.goal[0], text, fingerprint(model), key)


def unseal_goal(
    model: AttachedLM, sealed: bytes, text: GoalText, key: Key, *, model_fingerprint: str | None = None
) -> LatentState:
    """Check a sealed goal and give the state to start a rollout with: `model.generate(ids, goal=state)`.

    Args:
        text: the goal's text, as the one who asks for the rollout states it.
        model_fingerprint: `fingerprint(model)`, if it was taken already; it reads every tensor, so
            a server takes it once, after loading.

    Raises:
        GoalRejected: another key, model or text than it was sealed with, or any byte changed.
    """
    known = fingerprint(model) if model_fingerprint is None else model_fingerprint
    vector = unseal(sealed, text, known, key)
    weight = model.channel.film.projection.weight
    return model.encode_goal(LatentState(goal=vector.to(weight.device, weight.dtype).unsqueeze(0)))


def seal(vector: Tensor, text: GoalText, model_fingerprint: str, key: Key) -> bytes:
    """Seal one vector, (G,).

    Raises:
        ValueError: a vector of another shape, not finite or in float64, whose values float32 would change; or a key
            that can only check.
    """
    if vector.dim() != 1 or not vector.numel() or not vector.is_floating_point() or vector.dtype == torch.float64:
        raise ValueError(f"a goal vector is (G,) in float32 or narrower, got {tuple(vector.shape)} {vector.dtype}")
    if not bool(vector.isfinite().all()):
        raise ValueError("the goal vector holds NaN or infinity; nothing like that is sealed")
    values = vector.detach().float().cpu().numpy().astype("<f4").tobytes()
    header = _HEADER.pack(
        _MAGIC, _VERSION, key.algorithm, key.key_id, vector.numel(), bytes.fromhex(model_fingerprint), _text_hash(text)
    )
    return header + values + key.tag(header + values)


def unseal(sealed: bytes, text: GoalText, model_fingerprint: str, key: Key) -> Tensor:
    """The vector, (G,) float32, of a sealed goal.

    Raises:
        GoalRejected: as `unseal_goal`.
    """
    if len(sealed) < _HEADER.size or sealed[:4] != _MAGIC:
        raise GoalRejected("not a sealed goal: the header is missing")
    _, version, algorithm, key_id, width, model_hash, text_hash = _HEADER.unpack_from(sealed)
    if version != _VERSION:
        raise GoalRejected(f"the sealed goal has version {version}; this release reads {_VERSION}")
    if (algorithm, key_id) != (key.algorithm, key.key_id):
        raise GoalRejected(f"the goal was sealed with another key than {key!r}")
    end = _HEADER.size + 4 * width
    if len(sealed) != end + key.tag_bytes:
        raise GoalRejected("the sealed goal is cut short or too long: it was altered")
    if not key.matches(sealed[:end], sealed[end:]):
        raise GoalRejected("the tag does not match: the sealed goal was altered")
    # From here on all of it is the key holder's word.
    if not hmac.compare_digest(model_hash, bytes.fromhex(model_fingerprint)):
        raise GoalRejected("the goal was sealed for another model, or this one's weights have changed")
    if not hmac.compare_digest(text_hash, _text_hash(text)):
        raise GoalRejected("the goal was sealed for another goal text")
    return torch.from_numpy(np.frombuffer(sealed[_HEADER.size : end], dtype="<f4").astype(np.float32))


def _text_hash(text: GoalText) -> bytes:
    if isinstance(text, str):
        return hashlib.sha256(b"text\0" + text.encode("utf-8")).digest()
    return hashlib.sha256(b"ids\0" + struct.pack(f"<{len(text)}q", *text)).digest()
