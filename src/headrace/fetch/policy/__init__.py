"""What is asked of a store, how often and for how long: one place for all stores; clock and random numbers are given.

attempts.py   one range until it is all there      goal.py   what is known of it, and its bytes
host.py       one host: second requests, and all below
level.py turns.py   how many requests at once, and per second
retry.py            which failures are worth another attempt, when, and how many in all
hedge.py            when a first byte is late
watch.py      time limits of all requests, by one timer
"""
