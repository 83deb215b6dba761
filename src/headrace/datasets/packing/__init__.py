"""Documents of tokens packed into sequences of one length."""
