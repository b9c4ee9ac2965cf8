"""How replicas share a machine, and layouts that it has no room for."""

from __future__ import annotations

import os
import sys

import pytest

from octavo.async_llm import AsyncLLM
from octavo.base.errors import ConfigError
from octavo.llm import LLM
from octavo.server.engine import replica_launchers
from octavo.server.engine.replica_launchers import ReplicaLaunchers
from octavo.serving import load
from octavo.settings.engine import EngineArgs
from octavo.system import machine, numa


def args_of(number=0, **settings):
    """The settings that the engine of a replica is started with."""
    launchers = ReplicaLaunchers(EngineArgs("m", **{"data_parallel_size": 4, **settings}))
    return [launchers.create(each)._args for each in range(number + 1)][-1]


def test_each_engine_knows_how_many_share_the_machine(monkeypatch):
    assert args_of(device="cpu")["data_parallel_size"] == 4
    cores = machine.cpu().usable_cores
    assert load._threads_of_replica(1) is None
    assert load._threads_of_replica(2) == max(1, cores // 2)
    assert load._threads_of_replica(10**6) == 1
    text = ReplicaLaunchers(EngineArgs("m", device="cpu", data_parallel_size=2)).describe()
    assert f"2 replicas share {cores} cores" in text and "1/2 of the free memory" in text
    text = ReplicaLaunchers(EngineArgs("m", device="cpu", data_parallel_size=1000)).describe()
    assert "more threads than there are cores" in text
    given = {"device": "cpu", "data_parallel_size": 2, "threads": 1, "kv_cache_memory": "1GiB"}
    assert "free memory" not in ReplicaLaunchers(EngineArgs("m", **given)).describe()


def test_each_has_its_part_of_a_folder(tmp_path):
    args = args_of(2, device="cpu", kv_offload=f"{tmp_path}:4000")
    assert args["kv_offload"] == f"{tmp_path / 'replica-2'}:1000"


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is of Linux")
def test_decode_replicas_read_what_prefill_replicas_write():
    args = EngineArgs("m", device="cpu", data_parallel_size=4, prefill_replicas=2)
    launchers = ReplicaLaunchers(args)
    assert "2 of them compute prompts" in launchers.describe()
    files = [launchers.create(number)._transfer for number in range(5)]  # one is added later
    assert [each.own is not None for each in files] == [True, True, False, False, False]
    assert [sorted(each.peers) for each in files] == [[], [], [0, 1], [0, 1], [0, 1]]
    descriptors = [descriptor for each in files for descriptor in each.descriptors]
    assert len(set(descriptors)) == len(descriptors)
    for each in files[2:]:
        with pytest.raises(OSError):
            os.write(each.peers[0], b"x")
    assert launchers.create(3)._transfer is files[3]  # the same after a restart
    launchers.close()
    for descriptor in descriptors:
        with pytest.raises(OSError):
            os.fstat(descriptor)


def test_memory_is_shared_on_linux_alone(monkeypatch):
    monkeypatch.setattr(replica_launchers.sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="only Linux"):
        ReplicaLaunchers(EngineArgs("m", device="cpu", data_parallel_size=2, prefill_replicas=1))


def test_given_settings_stay_given():
    assert "seed" in args_of(device="cpu", seed=0, given=["seed"])["given"]


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_each_has_a_gpu_of_its_own(monkeypatch, device):
    monkeypatch.setattr(machine, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(machine, "num_gpus", lambda: 4)
    monkeypatch.setattr(replica_launchers.importlib.util, "find_spec", lambda name: True)
    assert [args_of(n, device=device)["device"] for n in range(4)] == [
        f"cuda:{n}" for n in range(4)
    ]
    with pytest.raises(ConfigError, match="no GPU for one more"):
        args_of(4, device=device)
    with pytest.raises(ConfigError, match="set it to 4, or device to cpu"):
        args_of(device=device, data_parallel_size=5)
    with pytest.raises(ConfigError, match="cuda:1 is one GPU"):
        args_of(device="cuda:1")


def test_each_has_as_many_gpus_as_ranks(monkeypatch):
    monkeypatch.setattr(machine, "num_gpus", lambda: 5)
    given = {"device": "cuda", "tensor_parallel_size": 2, "data_parallel_size": 2}
    assert [args_of(n, **given)["device"] for n in range(2)] == ["cuda:0", "cuda:2"]
    assert "2 GPUs of its own" in ReplicaLaunchers(EngineArgs("m", **given)).describe()
    with pytest.raises(ConfigError, match="all 4 are in use"):
        args_of(2, **given)
    with pytest.raises(ConfigError, match="needs 2 GPUs of its own, .* set it to 2"):
        args_of(**{**given, "data_parallel_size": 3})


def test_gpus_are_counted_without_pytorch(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    (tmp_path / "dev").mkdir()
    assert machine.num_gpus(tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert machine.num_gpus(tmp_path) == 2
    for visible, count in (("0", 1), ("0,3,5", 3), ("", 0), ("-1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machine.num_gpus(tmp_path) == count


@pytest.mark.parametrize("create", [LLM, AsyncLLM])
def test_in_python_there_is_one_engine(create):
    with pytest.raises(ConfigError, match="octavo serve m --data-parallel-size 2"):
        create("m", data_parallel_size=2)


def test_less_than_one_is_no_number():
    with pytest.raises(ConfigError, match="data_parallel_size must be an integer of at least 1"):
        EngineArgs("m", data_parallel_size=0)


def test_replicas_have_nodes_of_their_own(monkeypatch):
    nodes = tuple(numa.Node(n, tuple(range(4 * n, 4 * n + 4)), 1, 1) for n in range(2))
    monkeypatch.setattr(numa, "nodes", lambda: nodes)
    launchers = ReplicaLaunchers(EngineArgs("m", device="cpu", data_parallel_size=2, threads=3))
    made = [launchers.create(number) for number in range(3)]
    assert [launcher._cpus for launcher in made] == [(0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3)]
    assert {launcher._args["threads"] for launcher in made} == {3}
    monkeypatch.setattr(numa, "nodes", lambda: nodes[:1])
    assert (
        ReplicaLaunchers(EngineArgs("m", device="cpu", data_parallel_size=2)).create(0)._cpus == ()
    )


def test_what_one_had_goes_to_the_next(monkeypatch, tmp_path):
    """Replicas come and go, with ever new numbers: GPUs, cores and folders do not."""
    monkeypatch.setattr(machine, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(machine, "num_gpus", lambda: 2)
    monkeypatch.setattr(replica_launchers.importlib.util, "find_spec", lambda name: True)
    args = EngineArgs("m", device="cuda", data_parallel_size="1..2", kv_offload=f"{tmp_path}:8000")
    launchers = ReplicaLaunchers(args)
    first, second = launchers.create(0), launchers.create(1)
    with pytest.raises(ConfigError, match="no GPU for one more replica: all 2 are in use"):
        launchers.create(2)
    first.close()
    first.close()  # twice is once
    third = launchers.create(3)
    assert third._args["device"] == first._args["device"] == "cuda:0"
    assert third._args["kv_offload"] == first._args["kv_offload"]
    assert second._args["device"] == "cuda:1"
