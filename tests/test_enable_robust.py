"""enable() leaves the script alone, whatever fails."""

from _scripts import run_text

FAILING_PROOF = """
import warnings
import torch, fastpatch
from fastpatch.targets import TARGETS
TARGETS["sgd"].prove = lambda: 1 / 0
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    fastpatch.enable()
print([str(w.message) for w in caught])
print(fastpatch.is_enabled("sgd"), fastpatch.is_enabled("smooth_l1_loss"))
"""

NO_PWD = """
import sys
sys.modules["pwd"] = None  # as on Windows
import torch, fastpatch
print(fastpatch.targets())
"""

FORK = """
import os, signal, threading
import torch, fastpatch
from fastpatch import _build, _patching, _switch
fastpatch.enable()
held, done = threading.Event(), threading.Event()
def hold():
    with _switch._lock, _switch._set_up_lock, _patching._lock, _build._guard:
        held.set()
        done.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)  # a child that hangs dies of this
    with fastpatch.enabled():
        loss = torch.nn.functional.smooth_l1_loss(torch.ones(3), torch.zeros(3))
    fastpatch.disable()
    os._exit(0 if loss == 0.5 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
done.set()
thread.join()
"""

COLLECTED = """
import gc, threading
import torch, fastpatch
from fastpatch import _switch
from fastpatch.targets import TARGETS
def steps():
    with fastpatch.enabled("smooth_l1_loss"):
        yield
suspended = steps()
next(suspended)
prove = TARGETS["sgd"].prove
def collecting():
    suspended.close()  # as a collection of garbage in this thread would
    return prove()
TARGETS["sgd"].prove = collecting
worker = threading.Thread(target=fastpatch.enable, daemon=True)
worker.start()
worker.join(20)
print(worker.is_alive(), fastpatch.is_enabled("sgd"))
"""


def test_a_self_test_that_raises_leaves_its_target_to_stock(tmp_path):
    text, on = run_text(FAILING_PROOF, folder=tmp_path).stdout.splitlines()
    assert "leaves 'sgd' to PyTorch, since its self-test failed: ZeroDivisionError: division by zero" in text
    assert on == "False True"


def test_import_without_the_user_database(tmp_path):
    assert run_text(NO_PWD, folder=tmp_path).stdout == "('smooth_l1_loss', 'huber_loss', 'sgd')\n"


def test_a_child_forked_while_another_thread_holds_the_locks(tmp_path):
    assert run_text(FORK, folder=tmp_path).stdout == "0\n"


def test_a_scope_that_ends_in_the_self_tests_thread(tmp_path):
    assert run_text(COLLECTED, folder=tmp_path).stdout == "False True\n"
