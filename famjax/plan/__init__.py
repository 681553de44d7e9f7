"""`famjax plan`: the memory of a training job and a lower bound on its time, without its devices.

The training step is compiled ahead of time for devices that are only described, and its HLO text is
analyzed.
"""
