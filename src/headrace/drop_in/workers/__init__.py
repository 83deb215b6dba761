"""The workers of the torch regime: each makes whole batches by itself, as torch's workers do.

pool.py           the trainer's side: which worker makes which batch     records.py    what it knows of each
handles.py        how a worker comes to be, and is talked to             worker_main.py    what a worker does
batch_builder.py  a batch, made as torch's workers make it               batch_memory.py   where batches lie
object_table.py   objects between threads
"""
