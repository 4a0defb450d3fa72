"""Errors a caller can fix. Each says where, what was found, what was expected and the nearest legal value.

Faults that only this library can cause are assertions, never these.
"""


class KimiGraphError(Exception):
    """Base of every error a caller can fix; the command line prints it without a traceback and exits with 1."""


class ConfigError(KimiGraphError):
    """A config.json, preset name or argument that cannot be meant."""


class CheckpointError(KimiGraphError):
    """A checkpoint whose files, names, shapes or dtypes are not those of the model."""


class ShardingError(KimiGraphError):
    """A placement that does not exist: a size that does not divide, an axis without a rule."""


class CompileError(KimiGraphError):
    """A graph that cannot be lowered to the target, or that fails a check after a pass."""


class BundleError(KimiGraphError):
    """A bundle that is damaged, incomplete, or made for something else."""


class VerifyError(KimiGraphError):
    """A bundle whose execution differs from the model."""


class KernelError(KimiGraphError):
    """A kernel that cannot be built or run here, or that does what the device would not."""


class DeployError(KimiGraphError):
    """Hosts that a bundle cannot be deployed to, or a file that does not describe any."""
