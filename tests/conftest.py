"""Settings of all tests."""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

import fastpatch

# A first example pays for imports and for tensors of millions of elements; a slow machine is no failure.
_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("dev", deadline=None, suppress_health_check=_SLOW)
settings.register_profile("ci", deadline=None, suppress_health_check=_SLOW, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# What a script starts in the background ignores Ctrl-C, and so would all that the tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _off_afterwards():
    """No test leaves anything on, and none sees another's counts."""
    fastpatch.reset_report()
    yield
    fastpatch.disable()
    assert not fastpatch.is_enabled(), "a test left a scope open"
