"""Map-style data sets: batches, seeds, worker processes, and what is refused."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from fl_tasks import Examples, Samples, TaskError
from fl_tasks.batches import batches, ordered_batches, seed_everything
from fl_tasks.data.forms import as_data
from tests.fl_tasks.data.sets import Broken, Drawn, Dying, InProcess, Together, only_two
from tests.processes.process import ROOT, eventually

Batch = dict[str, Tensor]


@pytest.fixture
def closed() -> Iterator[list[Samples]]:
    """Data sets whose workers are stopped at the end of the test."""
    kept: list[Samples] = []
    yield kept
    for samples in kept:
        samples.close()


def values(made: Iterator[Batch]) -> list[dict[str, list[Any]]]:
    """The batches as lists."""
    return [{name: tensor.tolist() for name, tensor in batch.items()} for batch in made]


def test_batches_have_the_order_of_examples_in_memory() -> None:
    """The same seed orders a data set as it orders tensors, epoch after epoch, with the same sizes."""
    data = Samples(Drawn())
    memory = Examples(torch.arange(10), torch.arange(10))
    orders = [batch["index"].tolist() for batch in batches(data, 4, 3, epochs=2)]
    assert orders == [targets.tolist() for _, targets in batches(memory, 4, 3, epochs=2)]
    assert [len(order) for order in orders] == [4, 4, 2] * 2
    assert len(list(batches(data, 4, 3, steps=5))) == 5
    assert [batch["index"].tolist() for batch in ordered_batches(data, 6)] == [[*range(6)], [*range(6, 10)]]


def by_index(made: Iterator[Batch]) -> dict[int, tuple[float, ...]]:
    """The random numbers of each example."""
    return {
        int(index): tuple(drawn.tolist())
        for batch in made
        for index, drawn in zip(batch["index"], batch["drawn"], strict=True)
    }


def test_random_numbers_of_an_example_depend_on_seed_epoch_and_position_only() -> None:
    """Another batch size leaves them as they are; another seed or epoch gives others; examples have different ones."""
    data = Samples(Drawn())
    one = by_index(batches(data, 3, 5, epochs=1))
    assert one == by_index(batches(data, 7, 5, epochs=1))
    assert len({drawn for three in one.values() for drawn in three}) == 30
    second_epoch = by_index(islice(batches(data, 5, 5, epochs=2), 2, None))
    other_seed = by_index(batches(data, 3, 6, epochs=1))
    assert all(one[index] != second_epoch[index] != other_seed[index] for index in range(10))


def test_the_generators_of_the_process_are_as_before() -> None:
    """Dropout continues as if no example had been read; NumPy's and Python's generators too."""

    def drawn() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.random())]  # noqa: NPY002 - its state is tested

    results = []
    for reads in (False, True):
        seed_everything(1)
        random.seed(2)
        np.random.seed(3)  # noqa: NPY002 - its state is tested
        if reads:
            list(batches(Samples(Drawn()), 4, 5, epochs=1))
        results.append(drawn())
    assert results[0] == results[1]


def test_workers_change_no_bit(closed: list[Samples]) -> None:
    """Two workers make the batches of none: of three epochs, of a second round, and of a full gradient."""
    alone, helped = Samples(Drawn()), Samples(Drawn(), workers=2)
    closed.append(helped)
    seed_everything(1)
    expected = [values(batches(alone, 4, seed, epochs=3)) for seed in (5, 6)], values(ordered_batches(alone, 4))
    random_then = float(torch.rand(()))
    seed_everything(1)
    came = [values(batches(helped, 4, seed, epochs=3)) for seed in (5, 6)], values(ordered_batches(helped, 4))
    assert came == expected
    assert float(torch.rand(())) == random_then


def processes(made: Iterator[Batch]) -> set[int]:
    """The processes that read the batches."""
    return {int(process) for batch in made for process in batch["process"]}


def test_workers_stay_for_the_next_round_also_after_an_interruption(closed: list[Samples]) -> None:
    """The second iteration has the first one's processes, and its own batches, though the first one was not ended."""
    data = Samples(InProcess(), workers=2)
    closed.append(data)
    first = batches(data, 2, 5, epochs=4)
    began = processes(islice(first, 4))
    first.close()  # type: ignore[attr-defined] # a generator
    again = list(batches(data, 2, 7, epochs=1))
    assert processes(iter(again)) == began
    assert len(began) == 2
    expected = [batch["index"].tolist() for batch in batches(Samples(InProcess()), 2, 7, epochs=1)]
    assert [batch["index"].tolist() for batch in again] == expected


def test_only_two_data_sets_keep_their_workers(closed: list[Samples]) -> None:
    """A third one ends the processes of the one that was not used for longest."""
    sets = [Samples(InProcess(), workers=1) for _ in range(3)]
    closed.extend(sets)
    before = [processes(ordered_batches(samples, 5)) for samples in sets]
    assert processes(ordered_batches(sets[2], 5)) == before[2]
    assert processes(ordered_batches(sets[1], 5)) == before[1]
    assert processes(ordered_batches(sets[0], 5)) != before[0]


def test_two_iterations_at_a_time_with_workers_are_an_error(closed: list[Samples]) -> None:
    """The first one notices that it lost its workers, and gives no wrong batch."""
    data = Samples(Drawn(), workers=1)
    closed.append(data)
    first = ordered_batches(data, 2)
    next(first)
    next(ordered_batches(data, 2))
    with pytest.raises(RuntimeError, match="one iteration over a data set with workers at a time"):
        next(first)


READS = """
import sys, time
from fl_tasks import Samples
from fl_tasks.batches import batches
from tests.fl_tasks.data.sets import InProcess
if __name__ == "__main__":
    read = list(batches(Samples(InProcess(), workers=2), 2, 5, epochs=4))
    print(*{int(process) for batch in read for process in batch["process"]}, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_workers_end_with_a_killed_process(tmp_path: Path) -> None:
    """SIGKILL of the process that reads leaves no worker, and no server that forks them."""
    program = tmp_path / "reads.py"
    program.write_text(READS)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        servers = [worker.parent() for worker in workers]
        process.kill()
    assert len(workers) == 2
    eventually(
        lambda: not any(process.is_running() for process in [*workers, *servers] if process), "all processes have ended"
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_set_names_the_example(workers: int, closed: list[Samples]) -> None:
    """The message has the index in the data set and the exception, and further iterations work."""
    data = Samples(Subset(Broken(), [3, 7]), workers=workers)
    closed.append(data)
    for _ in range(2):
        with pytest.raises(TaskError, match="reading example 7 of the data raised KeyError: 'no file'"):
            list(ordered_batches(data, 2))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_collate_function_is_named(workers: int, closed: list[Samples]) -> None:
    """The message says how many examples the function got, and of which type."""
    data = Samples(Drawn(), only_two, workers=workers)
    closed.append(data)
    with pytest.raises(TaskError, match="collate function raised ValueError.*list of 3 examples of type dict"):
        list(ordered_batches(data, 3))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_lack_of_memory_stays_one(workers: int, closed: list[Samples]) -> None:
    """The daemon reports it as such, so it keeps its type."""
    data = Samples(Broken(MemoryError), workers=workers)
    closed.append(data)
    with pytest.raises(MemoryError):
        list(ordered_batches(data, 10))


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_iteration_and_not_the_next_one(closed: list[Samples]) -> None:
    """The error names the dead process. The next iteration starts another one."""
    data = Samples(Dying(), workers=1)
    closed.append(data)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="worker"):
            list(ordered_batches(data, 2))


def test_a_data_set_that_cannot_be_sent_to_a_worker_is_refused(closed: list[Samples]) -> None:
    """A lambda as collate function works without workers only, and the message says what to do."""
    data = Samples(Drawn(), lambda examples: examples[0], workers=1)
    closed.append(data)
    with pytest.raises(TaskError, match="workers = 1: .*no lambda.* or set workers = 0"):
        next(ordered_batches(data, 2))


def test_a_data_set_that_reads_batches_is_asked_once_for_each() -> None:
    """`__getitems__` gets the indices inside a subset, seeded by the batch's first example."""
    data = Samples(Subset(Together(), [9, 8, 7, 6]))
    first, again = (values(ordered_batches(data, 2)) for _ in range(2))
    assert [batch["index"] for batch in first] == [[9, 8], [7, 6]]
    assert first == again
    assert [len(set(batch["noise"])) for batch in first] == [1, 1]


def test_samples_are_cut_unread() -> None:
    """A slice, a mask and an index tensor select examples; an empty part has none."""
    data = Samples(Broken())
    assert (len(data[:0]), len(data[2:5]), len(data[torch.tensor([1, 2])])) == (0, 3, 2)
    assert len(data[torch.arange(10) % 2 == 0]) == 5
    assert [batch["index"].tolist() for batch in ordered_batches(data[4:6], 4)] == [[4, 5]]


class Stream(IterableDataset[int]):
    """Examples without numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Splits(dict[str, Any]):
    """A dictionary of data sets, as the datasets library returns one."""


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (Stream(), "for an iterable of batches.*Batched"),
        (DataLoader(Drawn()), "got DataLoader: for an iterable of batches.*Batched"),
        (3, "got int"),
        (Splits(train=Drawn(), test=Drawn()), "a Splits of train, test: choose one"),
        ((torch.zeros(2), torch.zeros(2)), r"a tuple: for two tensors return Examples\(inputs, targets\)"),
    ],
)
def test_other_things_are_refused_with_what_to_return(returned: Any, expected: str) -> None:
    """The message names the type that came and the form to use."""
    with pytest.raises(TaskError, match=expected):
        as_data(returned)


class Unformatted(Drawn):
    """A data set of the datasets library without a format gives Python lists."""

    format: Mapping[str, Any] = {"type": None}


def test_python_lists_are_not_stacked() -> None:
    """torch's collate function would turn them the wrong way; one's own is accepted."""
    with pytest.raises(TaskError, match=r'return dataset\.with_format\("torch"\)'):
        as_data(Unformatted())
    assert len(Samples(Unformatted(), only_two)) == 10


@pytest.mark.parametrize(("workers", "prefetch"), [(-1, 2), (0, 0)])
def test_numbers_of_workers_are_checked(workers: int, prefetch: int) -> None:
    """A negative number of workers, and none to read ahead."""
    with pytest.raises(TaskError, match=f"got {workers} and {prefetch}"):
        Samples(Drawn(), workers=workers, prefetch=prefetch)
