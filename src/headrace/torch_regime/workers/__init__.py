"""Workers for torch's data sets: each makes whole batches alone, as torch's workers do.

pool.py           the trainer's side: assigns batches to workers         starting.py        starts workers
messages.py       tasks and results                                      worker_main.py     the worker's main loop
batch_builder.py  makes batches as torch's workers do                    batch_memory.py    shared memory of batches
"""
