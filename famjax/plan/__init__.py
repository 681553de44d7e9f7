"""`famjax plan`: memory and lower bounds on time of a training job, without its devices.

The training step is compiled ahead of time for described devices, and its HLO text is analysed.
"""
