"""Every error that enfold raises on purpose.

EnfoldError
├── LayoutError        sizes that do not fit the ranks
├── ConfigError        a config.json or an option that can't be read or used
│   └── UnknownFamilyError   no table for this model: fold is refused, replicate and dp still run
├── CheckpointError    weights that are missing, unexpected, never written, or in a refused format
├── InputError         what a user gave to encode can't be used
├── QueueFullError     as many requests wait as may; come back later
├── QueueClosedError   the queue takes no more requests
├── DeadlineError      the time that a request had is over
└── EncodeError        a call that failed on at least one rank; raised alike on every rank
    ├── MismatchError  the ranks were called with different inputs
    └── LostRankError  a rank died or did not answer in time; the process group can't be used any more
"""

from __future__ import annotations


class EnfoldError(Exception):
    """Base of every error that enfold raises on purpose; its message names the numbers and the remedy."""


class LayoutError(EnfoldError, ValueError):
    """Sizes that do not fit the ranks."""


class ConfigError(EnfoldError, ValueError):
    """A config.json or an option that can't be read or used."""


class UnknownFamilyError(ConfigError):
    """No table says how this model is folded; `replicate` and `dp` need none."""


class CheckpointError(EnfoldError, RuntimeError):
    """Weights that are missing, unexpected, never written, or in a refused format."""


class InputError(EnfoldError, ValueError):
    """What a user gave to encode can't be used."""


class QueueFullError(EnfoldError, RuntimeError):
    """As many requests wait as may; come back later."""


class QueueClosedError(EnfoldError, RuntimeError):
    """The queue takes no more requests."""


class DeadlineError(EnfoldError, TimeoutError):
    """The time that a request had is over."""


class EncodeError(EnfoldError, RuntimeError):
    """A call that failed on at least one rank; every rank of the replica raises it with the same text."""


class MismatchError(EncodeError):
    """The ranks of a replica were called with different inputs."""


class LostRankError(EncodeError):
    """A rank died or did not answer in time; the process group can't be used any more."""
