"""Reads Arrow files and streams: finds batches of rows, and decodes them with pyarrow.

messages.py  the heads of messages       layout.py  the locations of batches
decoding.py  some columns of a batch     format.py  the format
"""
