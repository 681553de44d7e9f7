"""Experiments: configs loaded, overridden, checked and measured, before JAX allocates anything."""
