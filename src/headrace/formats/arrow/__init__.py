"""Reads Arrow files and streams: finds batches of rows (`layout.py`), and decodes them with pyarrow (`format.py`)."""
