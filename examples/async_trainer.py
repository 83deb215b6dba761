"""An async trainer: `async for` over the loader, and tasks of the program's own that run beside it.

Each training step runs in a thread, so the program's loop stays free; the loader reads on a loop of its own, and would
go on even if the step blocked this one.

    python examples/async_trainer.py
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import digits
import headrace as hr


class Progress:
    def __init__(self):
        self.steps, self.loss = 0, float("nan")


async def serve(progress, ready):
    """Tell how far the training is to whoever connects."""

    async def answer(_reader, writer):
        writer.write(f"step {progress.steps}, loss {progress.loss:.3f}\n".encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        ready.set_result(server.sockets[0].getsockname())
        await asyncio.Future()


async def watch(address):
    """Ask the server, as a dashboard would, and measure the longest time that this loop was kept busy."""
    longest = 0.0
    try:
        while True:
            reader, writer = await asyncio.open_connection(*address)
            print("dashboard:", (await reader.read()).decode().strip())
            writer.close()
            await writer.wait_closed()
            for _ in range(25):
                before = time.perf_counter()
                await asyncio.sleep(0.01)
                longest = max(longest, time.perf_counter() - before - 0.01)
    finally:
        print(f"the longest time that the loop did not turn: {longest * 1000:.0f} ms")


def step(net, optimizer, images, labels):
    loss = nn.functional.cross_entropy(net(images[:, None].float() / 255), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


async def train(loader, epochs, progress):
    net = digits.make_net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    async with loader:
        for _ in range(epochs):
            async for images, labels in loader:
                progress.loss = await asyncio.to_thread(step, net, optimizer, images, labels)
                progress.steps += 1


async def main(epochs):
    progress, ready = Progress(), asyncio.get_running_loop().create_future()
    with tempfile.TemporaryDirectory() as folder:
        digits.write_shards(Path(folder))
        data = hr.stream(f"{folder}/{digits.TRAIN}").shuffle(seed=17).decode("l8").to_tuple("png", "cls")
        loader = hr.DataLoader(data, batch_size=64, num_workers=2)
        async with asyncio.TaskGroup() as beside:
            tasks = [beside.create_task(serve(progress, ready)), beside.create_task(watch(await ready))]
            await train(loader, epochs, progress)
            for task in tasks:
                task.cancel()
    print(f"{progress.steps} steps, the last loss {progress.loss:.3f}")
    print(loader.report())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one epoch")
    torch.set_num_threads(1)
    asyncio.run(main(epochs=1 if parser.parse_args().quick else 5))
