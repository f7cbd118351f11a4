"""The errors a person may meet. Each carries one sentence: the value, what is allowed, and the cure.

``H3Error`` is a ``ValueError``: checks at the door raise it before any long work starts. Anything else that
escapes the package is a bug of ours.
"""


class H3Error(ValueError):
    """A request, file or option that cannot be used as it is."""


class CheckpointError(H3Error):
    """A weight file that is missing, damaged, incomplete or not what it was taken for."""


class MissingDependency(H3Error):
    """An optional library that this request needs and that is not installed."""


class NonFiniteError(H3Error):
    """NaN or infinity where numbers are needed; raised at the step it appears, never decoded or saved."""
