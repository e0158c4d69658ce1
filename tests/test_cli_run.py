"""`python -m fastpatch script.py` turns fastpatch on before the script can use torch, there and in every child process.

Who served is proved by the counters in the report.
"""

import json
import os

import pytest
from _cli_helpers import NOTHING, cli, must, python

import fastpatch

HEAD = """
import os, sys
import torch
import torch.nn.functional as F

def calls(n, loss=F.smooth_l1_loss):
    for _ in range(n):
        loss(torch.ones(3), torch.zeros(3))

def refused():
    F.huber_loss(torch.ones(3), torch.zeros(3).double())

def step():
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    torch.optim.SGD([parameter], lr=0.1).step()
"""


@pytest.fixture
def run(tmp_path):
    """Runs a text as a script; gives the process, and what the report counted."""

    def run(text, *options, **more):
        (tmp_path / "train.py").write_text(text)
        done = cli("--report", "report.json", *options, "train.py", folder=tmp_path, **more)
        report = tmp_path / "report.json"
        assert list(tmp_path.glob("fastpatch-report-*")) == []
        return done, json.loads(report.read_text()) if report.exists() else None

    return run


def counted(smooth_l1_loss=0, huber_loss=0, sgd=0, **fallback):
    fast = {"smooth_l1_loss": smooth_l1_loss, "huber_loss": huber_loss, "sgd": sgd}
    return {name: {"fast": fast[name], "fallback": fallback.get(f"{name}_fallback", {})} for name in NOTHING}


BEFORE_TORCH = f"""
import os, sys
assert not {{"torch", "fastpatch._native"}} & set(sys.modules)
os.environ["OMP_NUM_THREADS"] = "1"  # which only counts before torch is imported
early = set(sys.modules)
{HEAD}
assert torch.get_num_threads() == 1
assert "fastpatch._native" in sys.modules
assert not torch.__spec__._initializing
import inspect
assert inspect.getsource(torch)
assert type(torch.__loader__).__name__ == "SourceFileLoader" and "exec_module" not in vars(torch.__loader__)
from torch.nn.functional import smooth_l1_loss
calls(3, smooth_l1_loss)
calls(2)
refused()
step()
import fastpatch
assert fastpatch.targets()[0] == "smooth_l1_loss" and all(map(fastpatch.is_enabled, fastpatch.targets()))
sys.exit(17)
"""


def test_a_script_is_served_from_its_first_line_on_and_torch_comes_when_the_script_wants_it(run):
    done, report = run(BEFORE_TORCH, OMP_NUM_THREADS=None)
    assert (done.returncode, done.stderr) == (17, "")
    assert report["targets"] == counted(5, 0, 1, huber_loss_fallback={"dtype": 1})
    assert report["processes"] == 1
    assert report["kept_bytes"] == 0
    assert list(report["reasons"]) == ["dtype"]


def test_the_report_on_stderr_after_an_exception(tmp_path):
    (tmp_path / "train.py").write_text(f"{HEAD}\ncalls(4)\nrefused()\nraise KeyError(1)\n")
    done = cli("--report", "train.py", folder=tmp_path)
    assert done.returncode == 1
    header, file, line, error, *table = done.stderr.splitlines()
    assert header == "Traceback (most recent call last):"
    assert file.startswith(f'  File "{tmp_path / "train.py"}", line ')
    assert (line, error) == ("    raise KeyError(1)", "KeyError: 1")
    head, loss, huber, *_ = table
    assert head.split() == ["target", "fast", "fallback"]
    assert (loss.split(), huber.split()) == (["smooth_l1_loss", "4", "0"], ["huber_loss", "0", "1"])
    assert "processes" not in done.stderr


SWITCHES = f"""
{HEAD}
import json, fastpatch
fastpatch.enable()
on = list(filter(fastpatch.is_enabled, fastpatch.targets()))
try:
    refused()
    strict = False
except fastpatch.FallbackError:
    strict = True
print(json.dumps([on, strict]))
os._exit(0)
"""


@pytest.mark.parametrize(
    ("options", "variables", "on", "strict", "logged"),
    [
        (["--only", "sgd", "-v"], {}, ["sgd"], False, "sgd on"),
        (["--exclude", "sgd", "--strict"], {"FASTPATCH_ONLY": "sgd,huber_loss"}, ["huber_loss"], True, ""),
    ],
)
def test_options_hold_for_what_the_script_does_too(tmp_path, options, variables, on, strict, logged):
    (tmp_path / "train.py").write_text(SWITCHES)
    done = must(cli(*options, "train.py", folder=tmp_path, **variables))
    assert json.loads(done.stdout) == [on, strict]
    assert done.stderr == (f"fastpatch: INFO: {logged}\n" * 2 if logged else "")  # for us, and for the script


def test_verify_holds_for_child_processes_and_what_the_script_does(tmp_path, run):
    text = f"{HEAD}\nimport fastpatch, subprocess\nfastpatch.enable()\ncalls(3)\n" + (
        "if len(sys.argv) == 1:\n    subprocess.run([sys.executable, __file__, 'child'], check=True)"
    )
    done, report = run(text, "--verify", "1")
    assert done.returncode == 0, done.stderr
    assert report["verified"] == {"smooth_l1_loss": 6}


def test_switched_off(tmp_path):
    done = must(cli("--report", "-c", f"{HEAD}\ncalls(2)", folder=tmp_path, FASTPATCH="0"))
    assert done.stderr.splitlines()[-1] == "FASTPATCH=0 switched everything off"
    assert done.stderr.splitlines()[1].split() == ["smooth_l1_loss", "0", "0"]


def test_a_failing_build_is_said_once_and_stock_serves(tmp_path, run):
    broken = {"CXX": "/nonexistent/c++", "FASTPATCH_CACHE_DIR": str(tmp_path / "cache")}
    text = f"{HEAD}\nimport subprocess\ncalls(2)\nsubprocess.run([sys.executable, '-Werror', '-c', 'import torch'])"
    done, report = run(text, **broken)
    assert done.returncode == 0
    [line] = done.stderr.splitlines()
    assert line.startswith("fastpatch is off, PyTorch serves every call: CXX='/nonexistent/c++' wasn't")
    assert report["targets"] == counted()
    caught = "try:\n    import torch\nexcept Exception:\n    pass\nprint('went on')"
    done, _ = run(caught, "--strict", **broken)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("fastpatch: CXX='/nonexistent/c++' wasn't found")


# ---------------------------------------------------------------------------------------------------------- children


CHILDREN = f"""
{HEAD}
import multiprocessing, signal, subprocess
from concurrent.futures import ProcessPoolExecutor

class Local:
    \"\"\"Is found again by a child.\"\"\"
    n = 1000

def child(local):
    calls(local.n)

def bare_fork(n, end):
    if (pid := os.fork()) == 0:
        calls(n)
        end(0)
    os.waitpid(pid, 0)

if __name__ == "__main__":
    calls(1)
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(target=child, args=(Local(),))
        process.start()
        process.join()
        assert process.exitcode == 0
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        pool.submit(calls, 20_000).result()
    bare_fork(100_000, sys.exit)
    # These lose their own counts, and nothing else.
    bare_fork(500_000, os._exit)
    bare_fork(500_000, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    code = "import torch, torch.nn.functional as F; F.huber_loss(torch.ones(3), torch.zeros(3)); 1 / 0"
    failed = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert failed.returncode == 1 and failed.stderr.endswith("ZeroDivisionError: division by zero\\n")
    code = "import fastpatch; fastpatch.enable('sgd'); print(fastpatch.is_enabled('huber_loss'))"
    subprocess.run([sys.executable, "-c", code], check=True)
    calls(10)
"""


def test_children_inherit_it_and_their_counts_are_in_the_report(run):
    done, report = run(CHILDREN)
    assert (done.returncode, done.stderr) == (0, "")
    assert report["targets"] == counted(1 + 2 * 1000 + 20_000 + 100_000 + 10, 1)
    assert report["processes"] == 1 + 2 + 1 + 1 + 1
    assert done.stdout == "True\n"


STARTED_LATE = """
import multiprocessing, os, sys

def child():
    import torch
    torch.nn.functional.smooth_l1_loss(torch.ones(3), torch.zeros(3))

if __name__ == "__main__":
    children = [multiprocessing.get_context(method).Process(target=child) for method in ("fork", "forkserver")]
    for process in children:
        process.start()  # multiprocessing itself waits for them, at the end
    assert "torch" not in sys.modules
"""


def test_children_import_torch_and_their_parent_doesnt(run):
    done, report = run(STARTED_LATE)
    assert (done.returncode, done.stderr) == (0, "")
    assert report["targets"] == counted(2)
    assert report["processes"] == 2


WORKER = f"""
{HEAD}
import torch.distributed
torch.distributed.init_process_group("gloo")
calls(10 ** torch.distributed.get_rank())
torch.distributed.destroy_process_group()
"""


def test_torchrun(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "worker.py"]
    must(cli("--report=counts", *launcher, folder=tmp_path))
    report = fastpatch.Report.from_json((tmp_path / "counts").read_text())
    assert report.to_dict() == counted(11)
    assert report.processes == 2


INNER = """
import subprocess, sys
code = "import torch, torch.nn.functional as F; F.smooth_l1_loss(torch.ones(3), torch.zeros(3))"
sys.exit(subprocess.run([sys.executable, "-m", "fastpatch", "--report", "-c", code]).returncode)
"""


def test_a_run_inside_a_run_is_in_both_reports(run):
    done, report = run(INNER)
    assert done.returncode == 0
    assert done.stderr.splitlines()[1].split() == ["smooth_l1_loss", "1", "0"]
    assert (report["targets"], report["processes"]) == (counted(1), 1)


# A child that imports json, and one whose torch is another one: a package of that name.
UNSERVED = """
import os, subprocess, sys
os.environ["PYTHONPATH"] += os.pathsep + "other"
code = (
    "import json, sys, {name}, sitecustomize; ours = [name for name in sys.modules if name.startswith('fastpatch')];"
    "print(json.dumps([ours, sitecustomize.whose, [path for path in sys.path if '_inherit' in path]]))"
)
for name in ("json", "torch"):
    subprocess.run([sys.executable, "-c", code.format(name=name)], check=True)
"""


def test_a_child_without_torch_or_with_another_is_left_alone_and_its_own_sitecustomize_runs(tmp_path):
    (tmp_path / "train.py").write_text(UNSERVED)
    (tmp_path / "other" / "torch").mkdir(parents=True)
    (tmp_path / "other" / "torch" / "__init__.py").write_text("")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("whose = 'the user'")
    path = os.pathsep.join([str(tmp_path / "site"), os.path.dirname(os.path.dirname(fastpatch.__file__))])
    done = must(cli("train.py", folder=tmp_path, PYTHONPATH=path))
    assert done.stderr == ""
    assert list(map(json.loads, done.stdout.splitlines())) == [[[], "the user", []]] * 2


def test_a_child_whose_parents_fastpatch_is_gone_runs(tmp_path):
    """It says why it isn't served, once, and goes on."""
    folder = os.path.join(os.path.dirname(fastpatch.__file__), "_inherit")
    import torch

    run = {"package": str(tmp_path / "gone"), "torch": os.path.dirname(torch.__file__), "counts": None}
    path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    code = "import torch, sys; print('fastpatch' in sys.modules)"
    done = must(python("-c", code, folder=tmp_path, FASTPATCH_RUN=json.dumps(run), PYTHONPATH=path))
    assert done.stdout == "False\n"
    assert done.stderr.startswith("fastpatch: off in process ")
    assert len(done.stderr.splitlines()) == 1


def test_a_child_that_never_imports_torch_pays_next_to_nothing(tmp_path):
    """A few modules of the standard library, none of them ours."""
    code = "import sys; print(*sorted(sys.modules))"
    run = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    stock = set(must(python("-c", run, folder=tmp_path)).stdout.split())
    ours = set(must(cli("-c", run, folder=tmp_path)).stdout.split())
    assert ours - stock <= {"sitecustomize", "__future__", "importlib", "importlib.machinery", "warnings"} | {
        "importlib._bootstrap", "importlib._bootstrap_external"
    }  # fmt: skip


def test_the_report_file_is_written_at_once_and_others_can_be_written_to(tmp_path):
    target = tmp_path / "kept.json"
    target.write_text("old")
    (tmp_path / "link.json").symlink_to(target)
    text = "print(open('kept.json').read()); import os; os.chdir('/')"
    done = must(cli("--report", "link.json", "-c", text, folder=tmp_path))
    assert done.stdout == "old\n"
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads(target.read_text())["targets"] == NOTHING
    done = must(cli("--report=/dev/stdout", "-c", "pass", folder=tmp_path))
    assert json.loads(done.stdout)["targets"] == NOTHING
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.json", "link.json"]
