"""What a checkpoint can be wrong in."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the same message on every rank, with the file it is about.

    Nothing of the model or optimizer has been changed, and the ranks may go on: to train, or to try another one.
    """
