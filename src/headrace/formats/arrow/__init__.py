"""Arrow's files and streams: batches of rows whose columns lie one behind the other; pyarrow decodes them.

messages.py  the heads of messages       layout.py  the places of a file's or a stream's batches
decoding.py  some columns of a batch     format.py  all of it as a format
"""
