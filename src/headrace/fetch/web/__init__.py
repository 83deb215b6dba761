"""HTTP and HTTPS by our own client: GETs whose bodies are received straight into the reader's memory.

client.py        an address and a range in, a checked answer out; redirects
connections.py   the connections of one reader    lookups.py           where they lead
connection.py    one of them                      body.py              what comes over it
http1.py         requests and heads (pure)        statuses.py          what statuses mean
"""
