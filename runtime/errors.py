"""Every error a user can cause, as one tree. Broken invariants are `assert`s, not these.

ForgelineError
├── InvalidRequest            a request that can never run: the caller must change it          (HTTP 400, INVALID_ARG)
│   ├── PromptTooLong
│   └── UnsupportedFeature    known name, not available on this engine
├── QueueFull                 no room at the moment: the caller may retry                      (HTTP 503, UNAVAILABLE)
├── OutOfBlocks               internal to scheduling; the scheduler answers by preempting
├── EngineError               an engine directory that cannot be loaded
│   ├── EngineNotFound
│   ├── ManifestMismatch      version, architecture or option differs from what the engine was built for
│   └── ChecksumMismatch
├── BuildError                the builder refuses or cannot finish
│   ├── ModelNotFound
│   ├── UnsupportedModel
│   ├── CorruptCheckpoint
│   ├── FusionMismatch        a fusion did not fire as often as the model's layers imply
│   ├── PrecisionLost         a weight silently fell back to a wider type in the compiled model
│   ├── AccuracyGate          more accuracy was lost than allowed
│   └── OutOfDisk
└── ServerError               Triton could not be found, started or kept alive

A message is one sentence with the numbers, the limit and the remedy.
"""


class ForgelineError(Exception):
    """Base of everything above; `str(error)` is fit to show to a user."""


def sentence(error: ForgelineError | PermissionError) -> str:
    """What a command says; files it may not touch come from everywhere, and the user need not know from where."""
    if isinstance(error, PermissionError):
        return f"{error.filename} may not be opened by this user ({error.strerror}); change its permissions or give another path"
    return str(error)


class InvalidRequest(ForgelineError):
    pass


class PromptTooLong(InvalidRequest):
    pass


class UnsupportedFeature(InvalidRequest):
    pass


class QueueFull(ForgelineError):
    pass


class OutOfBlocks(ForgelineError):
    pass


class EngineError(ForgelineError):
    pass


class EngineNotFound(EngineError):
    pass


class ManifestMismatch(EngineError):
    pass


class ChecksumMismatch(EngineError):
    pass


class BuildError(ForgelineError):
    pass


class ModelNotFound(BuildError):
    pass


class UnsupportedModel(BuildError):
    pass


class CorruptCheckpoint(BuildError):
    pass


class FusionMismatch(BuildError):
    pass


class PrecisionLost(BuildError):
    pass


class AccuracyGate(BuildError):
    pass


class OutOfDisk(BuildError):
    pass


class ServerError(ForgelineError):
    pass
