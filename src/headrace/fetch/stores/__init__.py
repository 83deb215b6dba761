"""Every kind of store, as an implementation of `headrace.types.Store`.

addresses.py      the store of an address, and schemes added by users
object_stores.py  S3: obstore signs, our client requests; GCS, Azure and the rest by obstore
local.py          files           memory.py   a dictionary      fsspec_store.py   all other schemes
hf.py             Hugging Face's hub                            pipe.py           output of shell commands
writing.py        writes index files
"""
