"""fastpatch: one line makes an existing PyTorch training script faster and changes nothing else.

>>> import fastpatch
>>> fastpatch.enable()
"""

from ._errors import BuildError, FallbackError, NativeBuildWarning
from ._report import Report, explain, report, reset_report
from ._scope import disabled, enabled
from ._switch import disable, enable, is_enabled, targets
from ._version import __version__
from .targets import Explanation

__all__ = [
    "BuildError",
    "Explanation",
    "FallbackError",
    "NativeBuildWarning",
    "Report",
    "__version__",
    "disable",
    "disabled",
    "enable",
    "enabled",
    "explain",
    "is_enabled",
    "report",
    "reset_report",
    "targets",
]
