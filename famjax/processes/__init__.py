"""Processes: several that train together, and the setup of one before JAX is used."""
