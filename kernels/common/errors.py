"""Errors that callers can tell apart."""


class UnsupportedCase(RuntimeError):
    """A valid call that the chosen backend cannot run here; the message says why. Nothing falls back."""
