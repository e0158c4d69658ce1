"""Two processes that train together: equal to stock in every bit, and every update served, in both of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import fastpatch

CASES = Path(__file__).with_name("distributed_cases.py")
STEPS = 4
PARAMS = {
    "ddp": 6,
    "ddp_with_views_of_buckets": 6,
    "fsdp2": 6,
    "fsdp2_nesterov_maximize": 6,
    "fsdp2_without_momentum": 6,
    "fsdp2_foreach": 6,
    "fsdp2_bfloat16": 6,
    "fsdp2_through_the_inner_point": 6,
    "tensor_parallel": 4,
    "two_meshes": 6,
    "replaced_shards": 2,
    "in_two_groups": 3,
}

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this build of torch has no gloo")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes says of each case."""
    folder = tmp_path_factory.mktemp("distributed")
    path = os.pathsep.join(filter(None, [str(Path(fastpatch.__file__).parents[1]), os.getenv("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with fastpatch.enabled():
        pass  # built before two want it
    processes = [
        subprocess.Popen(
            [sys.executable, str(CASES), str(folder / "store"), str(rank), str(folder)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
            outputs.append({line["case"]: line for line in map(json.loads, output.splitlines())})
    finally:
        for process in processes:
            process.kill()
    return outputs


def test_every_case_is_judged(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank.keys() == {*PARAMS, "late_gradient_foreach", "zero_redundancy", "checkpoint", "partial_gradient"}


@pytest.mark.parametrize("name", PARAMS)
def test_a_training_of_two_processes(results: list[dict[str, Any]], name: str) -> None:
    for rank in results:
        assert rank[name] == {"case": name, "same": True, "fast": PARAMS[name] * STEPS, "fallback": {}}


def test_a_gradient_that_comes_late(results: list[dict[str, Any]]) -> None:
    for rank in results:
        late = {"case": "late_gradient_foreach", "same": True, "fast": 2 * STEPS - 1, "fallback": {}}
        assert rank["late_gradient_foreach"] == late


def test_each_process_updates_its_part_of_the_parameters(results: list[dict[str, Any]]) -> None:
    parts = [rank["zero_redundancy"] for rank in results]
    assert all(part["same"] and part["fast"] and not part["fallback"] for part in parts)
    assert sum(part["fast"] for part in parts) == 6 * STEPS


def test_a_training_goes_on_from_a_checkpoint(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["checkpoint"] == {"case": "checkpoint", "same": True, "fast": 2 * 6 * STEPS, "fallback": {}}


def test_a_partial_gradient_is_left_to_stock(results: list[dict[str, Any]]) -> None:
    for rank in results:
        left = {"case": "partial_gradient", "same": True, "fast": 0, "fallback": {"placements": 1}}
        assert rank["partial_gradient"] == left
