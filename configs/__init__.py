"""One file an experiment: `famjax train NAME` runs `configs/NAME.py`."""
