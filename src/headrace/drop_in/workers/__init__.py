"""The workers of the torch regime: each makes whole batches by itself, as torch's workers do.

pool.py           the trainer's side: which worker makes which batch     records.py         what it knows of each
starter.py        what starts workers: forked.py, of_context.py or threads.py
messages.py       what workers are told, and what they answer            worker_main.py     what a worker does
batch_builder.py  a batch, made as torch's workers make it               batch_memory.py    where batches lie
"""
