"""The fork server for all loaders of a process: its client, the start of its interpreter, and messages over sockets."""
