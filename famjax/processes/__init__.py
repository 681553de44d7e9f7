"""Processes: training with several of them, and the setup of a process before JAX is used."""
