"""Functions of plain arrays, without modules: attention, rotary positions, losses, scans.

Several have a custom VJP; the scans over tokens and blocks defer weight gradients.
"""
