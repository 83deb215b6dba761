"""The operators as methods of data sets: each puts its value behind the steps there are."""
