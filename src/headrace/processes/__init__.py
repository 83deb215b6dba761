"""Processes and their messages: the fork server for all loaders, its clients, and sockets.

fork_server.py    the process that forks workers; boot.py: starts its interpreter
fork_client.py    the trainer's side of the fork server
inheritance.py    what a worker inherits from the trainer, as a child process
stopped.py        detects processes that were stopped
wire.py           messages over a socket pair
"""
