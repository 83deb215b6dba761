"""Requests to a store: attempts, time limits, concurrency. One place for all stores.

attempts.py     one range until it is complete      range_request.py    its state and its bytes
endpoint.py     one host: hedged requests, and all below
limits.py semaphore.py      concurrency and rate limits
retry.py        which failures are retried, when and how often
deadlines.py    time limits of all requests, by one timer
"""
