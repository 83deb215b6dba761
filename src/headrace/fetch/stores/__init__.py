"""Every kind of store, behind one protocol (`headrace.types.Store`).

addresses.py      which store an address belongs to      registry.py   schemes that users add
s3.py             S3: addresses signed by obstore, carried by our own client
object_stores.py  GCS and Azure, and what our own client cannot do, by obstore
local.py          files           memory.py   a dictionary      fsspec_store.py   every other scheme
hf.py             Hugging Face's hub                            pipe.py           output of shell commands
writing.py        an index is written to where shards lie
"""
