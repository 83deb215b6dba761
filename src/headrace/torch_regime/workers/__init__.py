"""Workers for torch's data sets: each makes whole batches alone, as torch's workers do.

pool.py      the trainer's side: assigns batches to workers    starting.py     starts workers
messages.py  tasks and results                                 worker_main.py  the worker's main loop
"""
