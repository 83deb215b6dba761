"""Tar archives: where their samples lie.

scanner.py   reads an archive in successive buffers      headers.py   what one header says
regular.py   many plain members at once, by numpy        samples.py   which members make a sample
member_check.py   headers compared with an index
"""
