"""report() and reset_report(): who served how much, and why not. explain() has test_explain.py."""

import threading

import pytest
import torch
import torch.nn.functional as F
from _helpers import served

import fastpatch

NOTHING = {name: {"fast": 0, "fallback": {}} for name in ("smooth_l1_loss", "huber_loss", "sgd")}


def counts():
    return fastpatch.report().to_dict()


def parameter(dtype=torch.float32, size=3):
    param = torch.nn.Parameter(torch.ones(size, dtype=dtype))
    param.grad = torch.full((size,), 0.5, dtype=dtype)
    return param


def refuse(reason):
    """One call of the loss that is refused for this reason."""
    x = torch.ones(3)
    calls = {
        "dtype": lambda: F.smooth_l1_loss(x, x.double()),
        "strides": lambda: F.smooth_l1_loss(torch.ones(6).half()[::2], x),
        "beta": lambda: F.smooth_l1_loss(x, x, beta=1e-40),
        "device": lambda: F.smooth_l1_loss(x.to("meta"), x.to("meta")),
    }
    calls[reason]()


def test_nothing_happened():
    assert counts() == NOTHING
    fastpatch.enable()
    assert counts() == NOTHING  # the self-test isn't counted


def test_a_loss_call_is_one_unit():
    fastpatch.enable()
    for size in (1, 7, 40_000):
        F.smooth_l1_loss(torch.ones(size), torch.zeros(size))
    torch.nn.SmoothL1Loss()(torch.ones(2), torch.zeros(2))
    for reason in ("dtype", "strides", "dtype"):
        refuse(reason)
    torch.nn.HuberLoss()(torch.ones(2), torch.zeros(2))
    F.huber_loss(torch.ones(2), torch.zeros(2), weight=torch.ones(2))
    assert counts() == {
        **NOTHING,
        "smooth_l1_loss": {"fast": 4, "fallback": {"dtype": 2, "strides": 1}},
        "huber_loss": {"fast": 1, "fallback": {"weight": 1}},
    }


def test_a_parameter_is_one_unit_and_one_without_gradient_is_none():
    fastpatch.enable()
    without = torch.nn.Parameter(torch.ones(2))
    torch.optim.SGD([parameter(), without, parameter(torch.complex64), parameter()], lr=0.1).step()
    assert counts() == {**NOTHING, "sgd": {"fast": 2, "fallback": {"complex": 1}}}


def test_a_refused_group_is_one_unit():
    fastpatch.enable()
    groups = [{"params": [parameter(), parameter()], "fused": True}, {"params": [parameter()]}]
    torch.optim.SGD(groups, lr=0.1).step()
    assert counts() == {**NOTHING, "sgd": {"fast": 1, "fallback": {"fused": 1}}}


def test_a_group_that_one_parameter_makes_unfit_for_foreach_is_one_unit():
    fastpatch.enable()
    params = [parameter(), parameter(torch.complex64), parameter(), parameter(torch.complex64)]
    groups = [{"params": params, "foreach": True}, {"params": [parameter()], "foreach": True}]
    torch.optim.SGD(groups, lr=0.1).step()
    assert counts() == {**NOTHING, "sgd": {"fast": 1, "fallback": {"complex": 1}}}


def test_an_object_of_its_own():
    fastpatch.enable()
    report = fastpatch.report()
    F.smooth_l1_loss(torch.ones(3), torch.zeros(3))
    refuse("dtype")
    assert report.to_dict() == NOTHING
    later = fastpatch.report()
    fastpatch.reset_report()
    assert later.to_dict()["smooth_l1_loss"] == {"fast": 1, "fallback": {"dtype": 1}}
    later.to_dict()["smooth_l1_loss"]["fallback"].clear()
    assert later.to_dict()["smooth_l1_loss"] == {"fast": 1, "fallback": {"dtype": 1}}


def test_reset():
    fastpatch.enable()
    refuse("dtype")
    torch.optim.SGD([parameter()], lr=0.1).step()
    assert counts() != NOTHING
    assert fastpatch.reset_report() is None
    assert counts() == NOTHING
    assert fastpatch.is_enabled()


def test_disable_keeps_the_counters():
    fastpatch.enable()
    refuse("beta")
    fastpatch.disable()
    refuse("beta")
    assert counts()["smooth_l1_loss"] == {"fast": 0, "fallback": {"beta": 1}}


def test_counters_are_exact_over_threads():
    fastpatch.enable()
    x, y = torch.ones(3), torch.zeros(3)

    def work():
        for _ in range(300):
            F.smooth_l1_loss(x, y)
            refuse("device")

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts() == {**NOTHING, "smooth_l1_loss": {"fast": 1800, "fallback": {"device": 1800}}}


def test_types():
    fastpatch.enable()
    refuse("dtype")
    report = fastpatch.report()
    assert isinstance(report, fastpatch.Report)
    assert tuple(report.to_dict()) == fastpatch.targets()
    for target in report.to_dict().values():
        assert type(target["fast"]) is int
        assert all(type(code) is str and type(count) is int for code, count in target["fallback"].items())


def test_table_shows_every_number_and_the_most_frequent_reason_first():
    fastpatch.enable()
    for reason, times in (("device", 1), ("dtype", 11), ("strides", 2)):
        for _ in range(times):
            refuse(reason)
    F.smooth_l1_loss(torch.ones(3), torch.zeros(3))
    header, loss, *reasons, huber, sgd = str(fastpatch.report()).splitlines()
    assert header.split() == ["target", "fast", "fallback"]
    assert loss.split() == ["smooth_l1_loss", "1", "14"]
    counted = [line.split() for line in reasons if line.endswith(":")]
    assert counted == [["11", "dtype:"], ["2", "strides:"], ["1", "device:"]]
    assert huber.split() == ["huber_loss", "0", "0"]
    assert sgd.split() == ["sgd", "0", "0"]
    assert "a dtype or a mixture that is not served" in reasons[1]


@pytest.mark.parametrize(("last", "first"), [("smooth_l1_loss", "huber_loss"), ("huber_loss", "smooth_l1_loss")])
def test_memory_that_is_kept_is_shown_and_given_back_by_the_last_loss(first, last):
    fastpatch.enable()
    x = torch.ones(200_000, requires_grad=True)  # the gradient has 800,000 bytes
    F.huber_loss(x, torch.zeros(200_000)).backward()
    assert fastpatch.report().kept_bytes == 0  # it is in use
    assert "memory kept" not in str(fastpatch.report())
    x.grad = None
    assert fastpatch.report().kept_bytes == 800_000
    assert str(fastpatch.report()).splitlines()[-1] == "memory kept for the next large results: 0.8 MiB"
    F.smooth_l1_loss(x, torch.zeros(200_000)).backward()
    assert fastpatch.report().kept_bytes == 0  # it is in use again
    x.grad = None
    fastpatch.disable("sgd", first)
    assert fastpatch.report().kept_bytes == 800_000
    fastpatch.disable(last)
    assert fastpatch.report().kept_bytes == 0
    assert "memory kept" not in str(fastpatch.report())


def test_table_without_fallbacks_fits_80_columns():
    fastpatch.enable()
    F.smooth_l1_loss(torch.ones(3), torch.zeros(3))
    assert max(map(len, str(fastpatch.report()).splitlines())) <= 80


@pytest.mark.parametrize("reason", ["dtype", "strides", "beta"])
def test_table_with_a_reason_fits_80_columns(reason):
    fastpatch.enable()
    refuse(reason)
    assert max(map(len, str(fastpatch.report()).splitlines())) <= 80


# --- the first line of a reason


def test_the_first_line_of_each_reason_is_the_users():
    fastpatch.enable()
    x = torch.ones(3)

    def calls():
        torch.nn.SmoothL1Loss()(x, x.double())  # through a module of torch's
        torch.nn.SmoothL1Loss()(x, x.double())
        torch.optim.SGD([parameter()], lr=0.1, fused=True).step()

    calls()
    first = calls.__code__.co_firstlineno
    lines = {"smooth_l1_loss": {"dtype": f"{__file__}:{first + 1}"}, "sgd": {"fused": f"{__file__}:{first + 3}"}}
    report = fastpatch.report()
    assert report.first_lines == lines
    assert f"{__file__[-40:]}:{first + 1}\n" in str(report)  # however much of its beginning is cut off
    assert max(map(len, str(report).splitlines())) <= 80
    assert f"{__file__}:{first + 3}" in report._repr_html_()
    assert fastpatch.Report.from_json(report.to_json()).first_lines == lines
    fastpatch.reset_report()
    assert fastpatch.report().first_lines == {}
    refuse("dtype")
    assert fastpatch.report().first_lines["smooth_l1_loss"]["dtype"] != lines["smooth_l1_loss"]["dtype"]
    both = report + fastpatch.report()
    assert both.first_lines == lines  # those of the first report


def test_a_line_in_another_thread():
    fastpatch.enable()
    thread = threading.Thread(target=refuse, args=("beta",))
    thread.start()
    thread.join()
    assert fastpatch.report().first_lines["smooth_l1_loss"]["beta"].startswith(f"{__file__}:")


def test_the_first_fallback_of_a_reason_is_logged_once(caplog):
    fastpatch.enable()
    caplog.set_level("DEBUG", "fastpatch")
    for reason in ("dtype", "beta", "dtype", "dtype"):
        refuse(reason)
    logged = [record.getMessage() for record in caplog.records if record.levelname == "DEBUG"]
    assert [text.partition(" at ")[0] for text in logged] == [
        "smooth_l1_loss went to PyTorch (dtype)",
        "smooth_l1_loss went to PyTorch (beta)",
    ]


def test_a_logger_that_raises_does_not_cost_the_call(monkeypatch):
    from fastpatch import _switch

    fastpatch.enable()
    caught = []
    monkeypatch.setattr("sys.unraisablehook", caught.append)

    def broken(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(_switch._log, "debug", broken)
    with served("smooth_l1_loss", fallback={"dtype": 1}):
        refuse("dtype")
    assert [type(one.exc_value) for one in caught] == [ZeroDivisionError]


def test_calls_on_cuda_are_shown():
    """Whether they are counted is test_devices.py's to say, on a GPU."""
    counts = {"sgd": (5, {}), "huber_loss": (1, {})}
    report = fastpatch.Report(counts, {}, on_cuda={"sgd": 3})
    assert "sgd                         5            0\n  on CUDA                   3\n" in str(report)
    assert "3 on CUDA" in report._repr_html_()
    assert fastpatch.Report.from_json(report.to_json()).on_cuda == {"sgd": 3}
    assert (report + report).on_cuda == {"sgd": 6}
    assert report.since(fastpatch.Report(counts, {}, on_cuda={"sgd": 1})).on_cuda == {"sgd": 2}
    fastpatch.enable()
    F.smooth_l1_loss(torch.ones(3), torch.zeros(3))
    assert fastpatch.report().on_cuda == {}
