"""Requests to a store: attempts, time limits, concurrency. One place for all stores.

attempts.py     one range until it is complete      range_request.py    its state, bytes and time limits
endpoint.py     one host: hedged requests, and all below
limits.py       concurrency and rate limits, fair waiting
retry.py        which failures are retried, when and how often
"""
