"""The engine's side of loaders of our data sets: takes a job and epochs' plans, gives what runs; it knows no loader."""
