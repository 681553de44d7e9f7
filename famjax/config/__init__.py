"""The config schema, and the dotted key of each of its fields."""
