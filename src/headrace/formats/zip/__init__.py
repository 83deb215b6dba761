"""Zip archives: members are known from the directory at the end.

directory.py   what is said at the end      members.py   from a member's place to its bytes
format.py      all of it as a format, and .npz files
"""
