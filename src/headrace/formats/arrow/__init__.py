"""Arrow's files and streams: batches of rows whose columns lie one behind the other; pyarrow decodes them.

flat.py     FlatBuffers, in which heads are written      messages.py   what a head says of a batch
columns.py  which buffers are whose column      layout.py   where a file's or a stream's batches lie
decoding.py some columns of a batch, decoded      format.py   all of it as a format
"""
