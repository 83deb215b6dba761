"""A GET-only HTTP(S) client that receives bodies directly into the reader's memory.

client.py        from an address and a range to a checked answer; redirects
connections.py   the connections of one reader, and the addresses of hosts
connection.py    one connection and its bodies    index_pages.py       listings
http1.py         requests, heads, statuses (pure)
"""
