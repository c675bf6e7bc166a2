"""Random numbers and orders that depend on a key alone, never on what was drawn before.

Every example of an epoch is a function of (corpus, seed, epoch, index). Its draws are the raw words of a
Philox4x64-10 stream of its own. The stream's definition never changes, while NumPy's distributions do.
The order of an epoch is a keyed permutation, computed place by place: nothing is shuffled in memory, and
places can be read in any order.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; Luby & Rackoff 1988, "How to
construct pseudorandom permutations from pseudorandom functions"; Black & Rogaway 2002, "Ciphers with
arbitrary finite domains" (cycle walking).
"""

from __future__ import annotations

import hashlib

import numpy as np

_ROUNDS = 6
_MOST = 1 << 62  # places of a permutation


def key_of(*parts: object) -> int:
    """A key of 128 bits from texts and integers, such as a corpus's hash, a seed and a purpose."""
    for part in parts:
        if not isinstance(part, (str, int)) or isinstance(part, bool):
            raise TypeError(f"parts: expected texts and integers, got {part!r}")
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:16], "little")


class Draws:
    """The stream of random words of one (key, epoch, index).

    Args:
        key: what `key_of` returns.
        epoch, index: integers in [0, 2**64).
    """

    def __init__(self, key: int, epoch: int, index: int) -> None:
        for name, value in (("epoch", epoch), ("index", index)):
            if not 0 <= value < 1 << 64:
                raise ValueError(f"{name}: expected an integer in [0, 2**64), got {value!r}")
        # the lowest of the counter's four words counts the blocks of the stream
        self._philox = np.random.Philox(key=key, counter=int(epoch) << 64 | int(index) << 128)

    def words(self, count: int) -> np.ndarray:
        """(count,) uint64, uniform."""
        return self._philox.random_raw(count)

    def below(self, limit: int | np.ndarray, count: int) -> np.ndarray:
        """(count,) int64, uniform in [0, limit); `limit` is in [1, 2**32), a number or (count,) of them."""
        limit = np.asarray(limit, np.uint64)
        if limit.size and not (limit.min() >= 1 and limit.max() < 1 << 32):
            raise ValueError(f"limit: expected integers in [1, 2**32), got {limit.min()} to {limit.max()}")
        words = self.words(count)
        # the upper half of the 96-bit product
        low = (words & np.uint64(0xFFFFFFFF)) * limit >> np.uint64(32)
        return ((words >> np.uint64(32)) * limit + low >> np.uint64(32)).astype(np.int64)

    def chance(self, p: float, count: int) -> np.ndarray:
        """(count,) bool, each true with probability `p`, exact to 2**-53."""
        return (self.words(count) >> np.uint64(11)) < np.uint64(round(p * (1 << 53)))

    def shuffled(self, count: int) -> np.ndarray:
        """(count,) int64: the numbers from 0 on in a random order."""
        return np.argsort(self.words(count), kind="stable")


class Order:
    """A keyed permutation of [0, size), in constant memory.

    A Feistel network of six rounds permutes the numbers of an even count of bits; a number outside
    [0, size) is permuted again.

    Args:
        size: number of places, in [0, 2**62].
        key: what `key_of` returns; different keys have unrelated orders.
    """

    def __init__(self, size: int, key: int) -> None:
        if not 0 <= size <= _MOST:
            raise ValueError(f"size: expected an integer in [0, 2**62], got {size!r}")
        self.size = size
        self._half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
        self._mask = (np.uint64(1) << self._half) - np.uint64(1)
        self._keys = np.random.Philox(key=key).random_raw(_ROUNDS)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, places: np.ndarray) -> np.ndarray:
        """(n,) int64: the numbers at (n,) places.

        Raises:
            IndexError: a place outside [0, size).
        """
        if places.size and not (places.min() >= 0 and places.max() < self.size):
            raise IndexError(f"places: expected integers in [0, {self.size}), got {places!r}")
        found = places.astype(np.uint64)
        outside = np.ones(found.shape, bool)
        while outside.any():
            found[outside] = self._permuted(found[outside])
            outside = found >= self.size
        return found.astype(np.int64)

    def _permuted(self, x: np.ndarray) -> np.ndarray:
        left, right = x >> self._half, x & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & self._mask)
        return right << self._half | left


def _mixed(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words in which each bit depends on all others (splitmix64's finalizer)."""
    x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return x ^ x >> np.uint64(31)
