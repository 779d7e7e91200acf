"""The KV cache takes what is free and what can be used, and no more."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from millstream.shared.errors import SettingsError
from millstream.worker.engines import transformers_memory as memory

# SmolLM2-135M: 30 layers, 3 key-value heads of 64: 46,080 bytes a token in float32.
CONFIG = SimpleNamespace(
    num_hidden_layers=30,
    num_key_value_heads=3,
    num_attention_heads=9,
    head_dim=64,
    hidden_size=576,
    max_position_embeddings=8192,
)
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def plan(**changes):
    arguments = {
        "dtype": torch.float32,
        "device": CPU,
        "max_concurrent": 32,
        "flash": False,
        "available_bytes": 16 * 10**9,
        "cache_tokens": None,
        **changes,
    }
    return memory.plan_cache(CONFIG, **arguments)


def test_a_cpu_worker_takes_what_its_tasks_need():
    cache = plan()
    assert cache.cache_tokens == 32 * 640
    assert cache.cache_tokens * 46_080 < 1.0e9


def test_a_single_task_may_be_long_though_few_run_at_once():
    assert plan(max_concurrent=1).cache_tokens == 8192


def test_little_memory_makes_a_small_cache():
    cache = plan(available_bytes=100_000_000)
    assert 1_000 < cache.cache_tokens < 2_200


def test_too_little_memory_is_said():
    with pytest.raises(SettingsError, match="KV cache"):
        plan(available_bytes=5_000_000)


def test_a_gpu_holds_every_task_at_full_length_if_it_can():
    cache = plan(device=GPU, dtype=torch.bfloat16, available_bytes=100 * 10**9)
    assert cache.cache_tokens == 32 * 8192
    assert plan(device=GPU, dtype=torch.bfloat16, available_bytes=10**9).cache_tokens < 100_000


def test_flash_attention_has_its_own_pages():
    assert plan(device=GPU, dtype=torch.bfloat16, flash=True).page_tokens == 256


def test_a_step_has_room_for_every_task():
    assert plan(max_concurrent=2000, cache_tokens=8192).batch_tokens >= 2000


def test_the_containers_limit_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    free = memory.available_memory(CPU)
    (tmp_path / "memory.max").write_text("1000000000\n")
    (tmp_path / "memory.current").write_text("400000000\n")
    assert memory.available_memory(CPU) == min(free, 300_000_000)
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 200000000\nactive_file 5\n")
    assert memory.available_memory(CPU) == min(free, 400_000_000)
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory(CPU) > 300_000_000


def test_weights_that_are_still_to_come_count(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("1000000000\n")
    (tmp_path / "memory.current").write_text("400000000\n")
    free = memory.free_memory(CPU)
    assert memory.available_memory(CPU, weights=200_000_000) == (free - 200_000_000) // 2
    assert memory.available_memory(CPU, weights=2 * 10**9) == 0


@pytest.mark.parametrize(
    ("text", "cores"),
    [("max 100000", None), ("150000 100000", 2), ("50000 100000", 1), ("junk", None), (None, None)],
)
def test_the_containers_cpu_quota_counts(tmp_path, monkeypatch, text, cores):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    quota = (cores, "the container's CPU quota")
    assert memory.choose_threads() == (quota if cores else (64, "the machine's cores"))
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert memory.choose_threads() == (quota if cores else (64, "OMP_NUM_THREADS"))
