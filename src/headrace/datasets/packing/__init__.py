"""Packing of tokenized documents into sequences of one length."""
