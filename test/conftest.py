"""What every test starts from: no network, few threads, one seed, and uninitialised memory that shows itself.

`torch.empty` is poisoned: float memory reads NaN, integer memory its largest value, so a kernel that leaves an element
unwritten cannot pass by luck. PyTorch does the filling itself while deterministic algorithms are on
(`torch.utils.deterministic`); `warn_only` keeps ops without a deterministic version usable. PyTorch has no fill for
float4_e2m1fn_x2: allocate, clone or make contiguous as uint8 and view, or mark the test `no_poison`.
"""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Before the first import of torch and of the Hugging Face libraries, which read these once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else deterministic mode warns on each cuBLAS GEMM
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch
from hypothesis import settings

gc.disable()  # until tests are collected: imports make millions of objects and free few

if not torch.cuda.is_available():
    os.environ.setdefault("MSLK_PYTHON_ONLY", "1")  # where mslk is installed without a GPU, its import breaks torchao's
if not torch.cuda.is_available() or "PYTEST_XDIST_WORKER" in os.environ:
    # more are processes, each of which imports torch, and forks while threads run
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# A slow machine is not a bug, so no deadline; the pytest timeout catches what hangs.
settings.register_profile("aoquant", deadline=None)
settings.register_profile("nightly", deadline=None, max_examples=2000)
settings.load_profile("aoquant")


def pytest_configure(config: pytest.Config) -> None:
    """Share the cores between the xdist workers: torch would otherwise start one thread per core in each."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a suite in the background; tests of Ctrl-C need the handler
        signal.signal(signal.SIGINT, signal.default_int_handler)
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    torch.set_num_threads(threads)
    if workers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of the processes that tests start
    if os.environ.get("AOQUANT_REQUIRE_GPU") and not torch.cuda.is_available():
        raise pytest.UsageError("AOQUANT_REQUIRE_GPU is set, but torch sees no CUDA device")


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("dist", "no") != "no" and not hasattr(session.config, "workerinput"):
        gc.enable()  # this process starts xdist's workers, and collects nothing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is no CUDA device, and expect what an old torch fails on a CPU to fail."""
    if torch.__version__.startswith("2.11.") and not torch.cuda.is_available():
        listed = set((Path(__file__).parent / "support" / "torch_2_11.txt").read_text().splitlines())
        for item in items:
            if item.nodeid in listed:
                item.add_marker(pytest.mark.xfail(reason="torch 2.11 on a CPU", strict=True))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True, scope="module")
def collect_only_what_the_module_makes() -> None:
    """Freeze what imports and earlier modules left, millions of objects: `gc.collect`, which tests of memory call,
    would look at each of them again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def poison_uninitialized_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fill what `torch.empty` and its like return with NaN or the largest integer, unless marked `no_poison`."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(request.node.get_closest_marker("no_poison") is None, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed torch anew for each test, so that a test draws the same numbers alone, in any order, on any worker.

    Without a device the CPU's generator is all there is: `torch.manual_seed` would also keep the call, with its stack
    as text, for CUDA, XPU and MTIA in case they are ever initialised, a millisecond and 10 kB in each test.
    """
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
    return 0


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device a test should hold on; the CUDA half carries the `gpu` marker."""
    return torch.device(request.param)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Begin without compiled code and without counts of graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    """Undo what a test changes of torch's threads: programs that tests call take every core, and so would all later
    tests of the process.
    """
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture
def one_thread(keep_threads: None) -> None:
    """Run on one thread, for models so small that more threads only wait for one another, minutes on a busy machine."""
    torch.set_num_threads(1)
