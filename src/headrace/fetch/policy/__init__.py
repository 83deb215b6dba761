"""What is asked of a store, how often and for how long: one place for all stores; clock and random numbers are given.

attempts.py     one range until it is all there     range_request.py    what is known of it, and its bytes
endpoint.py     one endpoint: second requests when a first byte is late, and all below
limits.py semaphore.py      how many requests at once, and per second
retry.py        which failures are worth another attempt, when, and how many in all
deadlines.py    time limits of all requests, by one timer
"""
