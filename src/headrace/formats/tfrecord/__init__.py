"""TFRecord files: records with their lengths and checksums, each a tf.train.Example, or anything else.

scanner.py   where records lie      messages.py   the wire format of protocol buffers
examples.py  from the bytes of an example to a sample      format.py   all of it as a format
"""
