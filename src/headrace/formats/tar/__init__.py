"""Scans tar archives for the byte ranges of samples.

scanner.py   reads an archive in successive buffers      headers.py   parses one header
regular.py   parses many plain headers with numpy        samples.py   groups members into samples
member_check.py   compares headers with an index
"""
