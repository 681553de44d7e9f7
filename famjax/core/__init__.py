"""Modules that all other packages use: errors, types, untrusted files, units."""
