"""Threads that tests start and wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def in_threads(functions: list[Callable[[], Any]]) -> None:
    """Runs each in a thread of its own; none may raise."""
    errors: list[BaseException] = []

    def run(function: Callable[[], Any]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not errors, errors
