"""A GET-only HTTP(S) client that receives bodies directly into the reader's memory.

client.py        from an address and a range to a checked answer; redirects
connections.py   the connections of one reader, and the addresses of hosts
connection.py    one connection                   body.py              its bodies
http1.py         requests and heads (pure)        statuses.py          the meaning of statuses
"""
