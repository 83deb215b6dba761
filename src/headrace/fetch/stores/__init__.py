"""Every kind of store, as an implementation of `headrace.types.Store`.

addresses.py      the store of an address, and schemes added by users
s3.py             S3: obstore signs, our client requests
object_stores.py  GCS, Azure, and what our client does not support, by obstore
local.py          files           memory.py   a dictionary      fsspec_store.py   all other schemes
hf.py             Hugging Face's hub                            pipe.py           output of shell commands
writing.py        writes index files
"""
