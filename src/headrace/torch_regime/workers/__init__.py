"""Workers for torch's data sets: each makes whole batches alone, as torch's workers do.

`pool` is the trainer's side, which assigns batches. `starting` starts workers, and `worker_main` is what they run.
"""
