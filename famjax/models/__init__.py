"""The language model, and functions that map its parameters to other configs."""
