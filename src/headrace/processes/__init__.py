"""How processes come to be and talk: one fork server for all loaders, its clients, and messages over sockets.

fork_server.py    the process that forks workers; boot.py: how its interpreter starts
fork_client.py    the trainer's side of it
child.py          what makes a worker a child of the trainer
inheritance.py    what a worker takes over from the trainer
stopped.py        which of the processes that something is waited for were stopped
wire.py           messages over a socket pair
"""
