"""What can go wrong in the data plane, apart from what the C core (`core.CoreError`) and the registry say."""


class WeefsError(Exception):
    """Base of the data plane's own errors. The sentence says what was expected, what was received, and what to do."""


class LayerRefused(WeefsError):
    """A layer's metadata cannot be used: it is damaged, or not what the manifest promised."""


class NoRoom(WeefsError):
    """The cache has no room for what is to be brought into it."""


class CacheError(WeefsError):
    """The cache directory cannot be used."""


class JournalError(WeefsError):
    """The journal of a mount that is to be taken over is missing or damaged."""
