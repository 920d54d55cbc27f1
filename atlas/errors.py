"""Errors that tell the user what to do.

Every error that a user can cause names four things: *where* (the field, file or flag), *found*
(what was there), *accepted* (what would have been right) and *fix* (what to do now).
"""


class AtlasError(Exception):
    """Base of every error Atlas raises on purpose.

    Args:
        where: the field, file, flag or device that is wrong.
        found: what was found there.
        accepted: what is accepted; empty when `found` already says it.
        fix: what to do about it; empty when it is obvious.
    """

    def __init__(self, where: str, found: str, accepted: str = "", fix: str = "") -> None:
        self.where, self.found, self.accepted, self.fix = where, found, accepted, fix
        parts = [f"{where}: {found}"]
        if accepted:
            parts.append(f"accepted: {accepted}")
        if fix:
            parts.append(fix)
        super().__init__("; ".join(parts))


class ConfigError(AtlasError):
    """A flag, an environment variable or a configuration file is wrong."""


class CheckpointError(AtlasError):
    """A model's files are missing, damaged, contradictory or of a kind Atlas does not know."""


class BuildError(AtlasError):
    """A target, a kernel or the toolchain that compiles it is wrong."""


class DeviceError(AtlasError):
    """A device, its driver or a launch on it failed."""


class RequestError(AtlasError):
    """One request is wrong: HTTP 400. Never affects another request."""
