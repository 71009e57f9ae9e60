"""What the cores can multiply: 2 processes x 1 thread, products of 1024 x 1024 float32 matrices for half a second."""

import multiprocessing
import time
from typing import Any

import torch
from turns import answer, wait

WORKERS, SECONDS, SIZE = 2, 0.5, 1024


def multiply(barrier: Any, counts: Any) -> None:
    torch.set_num_threads(1)
    a, b = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    a @ b
    barrier.wait()
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        a @ b
        done += 1
    counts.put(2.0 * SIZE**3 * done / (time.perf_counter() - began))


def main() -> None:
    context = multiprocessing.get_context("fork")
    while True:
        wait()
        barrier, counts = context.Barrier(WORKERS), context.SimpleQueue()
        workers = [context.Process(target=multiply, args=(barrier, counts)) for _ in range(WORKERS)]
        for worker in workers:
            worker.start()
        answer(flop_per_second=sum(counts.get() for _ in workers))
        for worker in workers:
            worker.join()


if __name__ == "__main__":
    main()
