"""The user's face: data sets whose samples come asynchronously, and the operators on them."""
